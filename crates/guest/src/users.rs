//! Users and groups as /etc/passwd and /etc/group have them. The guest is static and must not depend on NSS.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::plain_file;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups, `gid` among them.
    pub(crate) groups: Vec<u32>,
    pub(crate) home: PathBuf,
    pub(crate) shell: String,
}

/// A user by name, or by number if no name fits.
pub(crate) fn find(name: &str) -> Option<User> {
    find_in(name, &plain_file::text(PASSWD), &plain_file::text(GROUP))
}

fn find_in(name: &str, passwd: &str, group: &str) -> Option<User> {
    let entries = || passwd.lines().filter_map(parse_passwd);
    let mut user = entries().find(|u| u.name == name).or_else(|| {
        let uid: u32 = name.parse().ok()?;
        entries().find(|u| u.uid == uid).or_else(|| Some(bare(name, uid)))
    });
    if user.is_none() && name == "root" {
        user = Some(User {
            home: PathBuf::from("/root"),
            ..bare("root", 0)
        });
    }
    let mut user = user?;
    user.groups = std::iter::once(user.gid)
        .chain(group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let gid = fields.nth(2)?.parse().ok()?;
            let member = fields.next()?.split(',').any(|m| m == user.name);
            (member && gid != user.gid).then_some(gid)
        }))
        .collect();
    Some(user)
}

fn bare(name: &str, uid: u32) -> User {
    User {
        name: name.into(),
        uid,
        gid: uid,
        groups: Vec::new(),
        home: PathBuf::from("/"),
        shell: "/bin/sh".into(),
    }
}

fn parse_passwd(line: &str) -> Option<User> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|n| !n.is_empty())?;
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields
        .nth(1)
        .filter(|h| Path::new(h).is_absolute())
        .unwrap_or("/");
    let shell = fields.next().filter(|s| !s.is_empty()).unwrap_or("/bin/sh");
    Some(User {
        name: name.into(),
        uid,
        gid,
        groups: Vec::new(),
        home: home.into(),
        shell: shell.into(),
    })
}

/// Names by number, for listings.
#[derive(Debug, Default)]
pub(crate) struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    pub(crate) fn read() -> Self {
        let numbered = |text: String| {
            let mut names = HashMap::new();
            for line in text.lines() {
                let mut fields = line.split(':');
                if let (Some(name), Some(Ok(id))) = (fields.next(), fields.nth(1).map(str::parse)) {
                    names.entry(id).or_insert_with(|| name.to_owned());
                }
            }
            names
        };
        Self {
            users: numbered(plain_file::text(PASSWD)),
            groups: numbered(plain_file::text(GROUP)),
        }
    }

    pub(crate) fn user(&self, uid: u32) -> String {
        self.users.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }

    pub(crate) fn group(&self, gid: u32) -> String {
        self.groups.get(&gid).cloned().unwrap_or_else(|| gid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbroken line\nuser:x:1000:1001::/home/user:\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:other,user\ndocker:x:999:users\nuser:x:1001:user\n";

    #[test]
    fn a_user_is_found_by_name_with_its_groups() {
        let user = find_in("user", PASSWD, GROUP).unwrap();
        assert_eq!((user.uid, user.gid), (1000, 1001));
        assert_eq!(user.groups, [1001, 27]);
        assert_eq!(user.home, Path::new("/home/user"));
        assert_eq!(user.shell, "/bin/sh");
    }

    #[test]
    fn a_user_is_found_by_number_even_without_an_entry() {
        assert_eq!(find_in("1000", PASSWD, GROUP).unwrap().name, "user");
        let nobody = find_in("4242", PASSWD, GROUP).unwrap();
        assert_eq!(
            (nobody.uid, nobody.gid, nobody.home.as_path()),
            (4242, 4242, Path::new("/"))
        );
    }

    #[test]
    fn an_unknown_name_is_not_found_but_root_always_is() {
        assert_eq!(find_in("ghost", PASSWD, GROUP), None);
        assert_eq!(find_in("broken line", PASSWD, GROUP), None);
        assert_eq!(find_in("root", "", "").unwrap().uid, 0);
    }
}
