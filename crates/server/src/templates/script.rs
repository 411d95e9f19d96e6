//! Instructions of a template builder, as E2B's SDKs send them: each is done as the user, in the directory and with the
//! environment that the ones before it have set.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;

use super::report::Report;
use super::steps::{MAKE_USER, run, shortened};
use super::uploads::Upload;
use super::{Result, TemplateError};
use crate::guest_client::{GuestClient, Run};
use crate::records::TemplateLimits;

/// What of an archive is in memory at a time.
const PIECE: usize = 4 << 20;
/// On the template's own disk, and only while the instruction lasts.
const ARCHIVE: &str = "/var/tmp/.dorm-copy";
/// Whom the images that E2B builds on have, and this server's `base`.
const USER: &str = "user";
const HOME: &str = "/home/user";

/// Copies what `$1` names in the archive to `$2`, as a Dockerfile's COPY does: of a directory its content, a file to the
/// name or into the directory, several files into the directory. Modes: `$4` of files, `$5` of directories.
const COPY: &str = r#"
src=$1 dest=$2 owner=$3 mode=$4 dir_mode=$5
mkdir -p "$PARTS/tree"
cat "$PARTS"/part-* | tar -xf - $ZIPPED -C "$PARTS/tree"
rm -f "$PARTS"/part-*
cd "$PARTS/tree"
chown -R -h -- "$owner" .
if [ -n "$mode" ]; then
    find . -type f -exec chmod -- "$mode" {} +
    find . -type d -exec chmod -- "$dir_mode" {} +
fi
# A name with spaces is one name, and yet a pattern.
IFS=
count=0
for one in $src; do
    if [ ! -e "$one" ] && [ ! -L "$one" ]; then echo "there is no $one in what was uploaded" >&2; exit 1; fi
    count=$((count + 1))
done
make_dir() {
    if [ -d "$1" ]; then return; fi
    make_dir "$(dirname "$1")"
    mkdir "$1"
    chown -- "$owner" "$1"
}
for one in $src; do
    if [ -d "$one" ] && [ ! -L "$one" ]; then
        make_dir "$dest"
        cp -a "$one/." "$dest/"
    elif [ "$count" -gt 1 ] || [ -d "$dest" ] || [ "${dest%/}" != "$dest" ]; then
        make_dir "${dest%/}"
        cp -a "$one" "$dest/"
    else
        make_dir "$(dirname "$dest")"
        cp -a "$one" "$dest"
    fi
done
"#;

const WORKDIR: &str = r#"if [ ! -d "$1" ]; then mkdir -p -- "$1"; chown -- "$2" "$1"; fi"#;

/// E2B's users may become root.
const SUDO: &str = r#"
if [ -d /etc/sudoers.d ] && [ ! -e "/etc/sudoers.d/$1" ]; then
    printf '%s ALL=(ALL:ALL) NOPASSWD: ALL\n' "$1" >"/etc/sudoers.d/$1"
    chmod 0440 "/etc/sudoers.d/$1"
fi
"#;

/// The shell that the SDKs' commands have, where there is one.
const SHELL: &str = r#"
if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; fi
exec /bin/sh -l -c "$1"
"#;

/// What a builder asks for beyond a recipe.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Script {
    pub instructions: Vec<Instruction>,
    /// It begins with an image, which may not have the user whom sandboxes have.
    pub from_image: bool,
    pub ready: Option<String>,
    pub limits: TemplateLimits,
    /// By which the build is known; another build of the same is the same template.
    #[serde(skip)]
    pub build: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum Instruction {
    Run {
        command: String,
        user: Option<String>,
    },
    Copy {
        archive: Upload,
        from: String,
        to: String,
        user: Option<String>,
        mode: Option<u32>,
    },
    Env(BTreeMap<String, String>),
    Workdir(String),
    User(String),
}

/// What the instructions so far have made of the defaults.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Place {
    pub(super) user: Option<String>,
    pub(super) workdir: Option<String>,
    pub(super) env: BTreeMap<String, String>,
}

impl Place {
    fn after(mut self, instruction: &Instruction) -> Self {
        match instruction {
            Instruction::Run { .. } | Instruction::Copy { .. } => {}
            Instruction::Env(env) => self.env.extend(env.clone()),
            Instruction::Workdir(path) => self.workdir = Some(self.resolve(path)),
            Instruction::User(user) => self.user = Some(user.clone()),
        }
        self
    }

    fn user(&self) -> &str {
        self.user.as_deref().unwrap_or("root")
    }

    /// A path that is not absolute begins where the instructions are.
    fn resolve(&self, path: &str) -> String {
        if path.starts_with('/') {
            return path.to_owned();
        }
        let workdir = self.workdir.clone().unwrap_or_else(|| match self.user() {
            "root" => "/root".to_owned(),
            user => format!("/home/{user}"),
        });
        format!("{}/{path}", workdir.trim_end_matches('/'))
    }
}

/// An instruction where it stands.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Placed {
    /// Counted from 1; 0 is what comes before the first.
    number: usize,
    instruction: Instruction,
    place: Place,
}

impl Script {
    /// The instructions, each in its place, and the place after them all.
    pub(super) fn placed(&self, mut place: Place) -> (Vec<Placed>, Place) {
        let before = match self.from_image {
            true => vec![
                Instruction::User(USER.to_owned()),
                Instruction::Workdir(HOME.to_owned()),
            ],
            false => Vec::new(),
        };
        let numbered = std::iter::repeat(0)
            .zip(&before)
            .chain((1..).zip(&self.instructions));
        let mut all = Vec::new();
        for (number, instruction) in numbered {
            all.push(Placed {
                number,
                instruction: instruction.clone(),
                place: place.clone(),
            });
            place = place.after(instruction);
        }
        (all, place)
    }
}

/// The number of the instruction in the title of its step.
pub(crate) fn number_in(title: &str) -> Option<&str> {
    let (number, _) = title.strip_prefix("Instruction ")?.split_once(':')?;
    Some(number)
}

impl Placed {
    pub(super) fn title(&self) -> String {
        let what = match &self.instruction {
            Instruction::Run { command, .. } => format!("RUN {command}"),
            Instruction::Copy { from, to, .. } => format!("COPY {from} {to}"),
            // Their values may be secret.
            Instruction::Env(env) => format!("ENV {}", env.keys().cloned().collect::<Vec<_>>().join(" ")),
            Instruction::Workdir(path) => format!("WORKDIR {path}"),
            Instruction::User(user) => format!("USER {user}"),
        };
        match self.number {
            0 => shortened(&format!("Prepare the image: {what}")),
            number => shortened(&format!("Instruction {number}: {what}")),
        }
    }

    pub(super) async fn perform(&self, guest: &GuestClient, report: &mut Report) -> Result<()> {
        let place = &self.place;
        match &self.instruction {
            Instruction::Run { command, user } => {
                let mut env = BTreeMap::from([("DEBIAN_FRONTEND".to_owned(), "noninteractive".to_owned())]);
                env.extend(place.env.clone());
                let command = Run {
                    command: "/bin/sh",
                    args: &["-c", SHELL, "sh", command],
                    user: user.as_deref().unwrap_or_else(|| place.user()),
                    workdir: place.workdir.as_deref(),
                    env,
                };
                run(guest, report, &command).await
            }
            Instruction::Copy {
                archive,
                from,
                to,
                user,
                mode,
            } => {
                let zipped = send(guest, archive).await?;
                let user = user.as_deref().unwrap_or_else(|| place.user());
                let owner = match user.contains(':') {
                    true => user.to_owned(),
                    false => format!("{user}:"),
                };
                let (mode, dir_mode) = modes(*mode);
                let from = format!("./{from}");
                let args = [COPY, "sh", &from, &place.resolve(to), &owner, &mode, &dir_mode];
                let copied = as_root(guest, report, &args, zipped).await;
                as_root(guest, report, &[r#"rm -rf "$PARTS""#], zipped).await?;
                copied
            }
            Instruction::Workdir(path) => {
                let owner = format!("{}:", place.user());
                let args = [WORKDIR, "sh", &place.resolve(path), &owner];
                as_root(guest, report, &args, false).await
            }
            Instruction::User(user) => {
                if user == "root" || user.parse::<u32>().is_ok() {
                    return Ok(());
                }
                as_root(guest, report, &[MAKE_USER, "sh", user], false).await?;
                as_root(guest, report, &[SUDO, "sh", user], false).await
            }
            Instruction::Env(_) => Ok(()),
        }
    }
}

/// Runs a shell script with its parameters, up to the first command that fails.
async fn as_root(guest: &GuestClient, report: &mut Report, script: &[&str], zipped: bool) -> Result<()> {
    let unpack = if zipped { "-z" } else { "" };
    let args: Vec<&str> = ["-e", "-c"].into_iter().chain(script.iter().copied()).collect();
    let command = Run {
        command: "/bin/sh",
        args: &args,
        user: "root",
        workdir: Some("/"),
        env: BTreeMap::from([
            ("PARTS".to_owned(), ARCHIVE.to_owned()),
            ("ZIPPED".to_owned(), unpack.to_owned()),
        ]),
    };
    run(guest, report, &command).await
}

/// Puts an archive into the box, in pieces. Says whether it is compressed.
async fn send(guest: &GuestClient, archive: &Upload) -> Result<bool> {
    let (mut number, mut offset, mut zipped) = (0, 0, false);
    loop {
        let reader = archive.clone();
        let piece = tokio::task::spawn_blocking(move || reader.read_at(offset, PIECE)).await;
        let piece = piece.unwrap_or_else(|panicked| Err(std::io::Error::other(panicked)));
        let piece = piece.map_err(TemplateError::io("read what was uploaded"))?;
        if piece.is_empty() {
            return Ok(zipped);
        }
        zipped |= offset == 0 && piece.starts_with(&[0x1f, 0x8b]);
        offset += piece.len() as u64;
        let part = format!("{ARCHIVE}/part-{number:06}");
        guest.write_file(&part, Bytes::from(piece)).await?;
        number += 1;
    }
}

/// Of files and of directories: whoever may read one may look into it.
fn modes(mode: Option<u32>) -> (String, String) {
    match mode {
        None => (String::new(), String::new()),
        Some(mode) => (
            format!("{mode:04o}"),
            format!("{:04o}", mode | (mode & 0o444) >> 2),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_instruction_stands_where_those_before_it_lead() {
        let script = Script {
            instructions: vec![
                Instruction::Workdir("/app".to_owned()),
                Instruction::User("dev".to_owned()),
                Instruction::Workdir("src".to_owned()),
                Instruction::Run {
                    command: "make".to_owned(),
                    user: None,
                },
            ],
            from_image: true,
            ..Script::default()
        };
        let (placed, last) = script.placed(Place::default());
        let steps: Vec<_> = placed
            .iter()
            .map(|one| number_in(&one.title()).map(str::to_owned))
            .collect();
        assert_eq!(steps[..3], [None, None, Some("1".to_owned())]);
        assert_eq!(placed[2].place.user(), "user");
        assert_eq!(placed[2].place.resolve("x"), "/home/user/x");
        assert_eq!(placed[5].place.user(), "dev");
        assert_eq!(last.workdir.as_deref(), Some("/app/src"));
        assert_eq!(number_in("Seal the template"), None);
    }

    #[test]
    fn a_directory_can_be_entered_by_whoever_can_read_its_files() {
        let both = |mode| modes(Some(mode));
        assert_eq!(both(0o640), ("0640".to_owned(), "0750".to_owned()));
        assert_eq!(both(0o700), ("0700".to_owned(), "0700".to_owned()));
        assert_eq!(modes(None), (String::new(), String::new()));
    }
}
