//! Modules of the kernel, for whatever in the machine asks for them.
//!
//! All that came with the kernel are on a disk of their own, which cannot be written. The kernel asks for what it misses by starting a
//! program, and a box need not have one: this one is it. It knows what `depmod` wrote beside the modules.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use dorm_proto::boot::GUEST_PATH;

use super::early::{KEPT_MODULES, mount};
use crate::log::log;
use crate::sys::check;

/// Where the modules are, with their own names and in the folders in which they came.
const TREE: &str = "/run/dorm/modules";
const ASKED: &str = "/proc/sys/kernel/modprobe";
/// How the kernel calls the program, before the name of the module.
pub(crate) const CALLED_WITH: [&str; 2] = ["-q", "--"];

/// Makes the modules on `disk` those of the machine.
pub(super) fn use_disk(disk: &str) -> io::Result<()> {
    let flags = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    mount(disk, TREE, "ext4", flags, "")?;
    fs::write(ASKED, GUEST_PATH)?;
    // Where programs of the box look for them.
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let usual = format!("/lib/modules/{}", release.trim());
    fs::create_dir_all(&usual)?;
    mount(TREE, &usual, "", libc::MS_BIND, "")
}

/// Loads the module of this name or alias, and before it what it needs.
pub(crate) fn load_by_name(name: &str) -> io::Result<()> {
    let read = |file: &str| fs::read_to_string(Path::new(TREE).join(file));
    let needs = read("modules.dep")?;
    let files = files_for(name, &read("modules.alias")?, &needs);
    if files.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("there is no module {name}"),
        ));
    }
    for file in files {
        load(&Path::new(TREE).join(file))?;
    }
    Ok(())
}

/// In the order in which they are to be loaded.
fn files_for<'a>(name: &str, aliases: &str, needs: &'a str) -> Vec<&'a str> {
    let aliased = aliases.lines().filter_map(|line| {
        let (alias, module) = line.strip_prefix("alias ")?.rsplit_once(' ')?;
        (alias == name).then_some(module)
    });
    let mut wanted: Vec<String> = aliased.map(plain).collect();
    if wanted.is_empty() {
        wanted.push(plain(name));
    }
    let needs: HashMap<String, Vec<&str>> = needs
        .lines()
        .filter_map(|line| {
            let (file, needs) = line.split_once(':')?;
            // What is named last is needed by what is named before.
            let files = needs.split_whitespace().rev().chain([file]).collect();
            Some((module_in(file), files))
        })
        .collect();
    wanted
        .iter()
        .filter_map(|name| needs.get(name))
        .flatten()
        .copied()
        .collect()
}

/// Names of modules are the same with either dash.
fn plain(name: &str) -> String {
    name.replace('-', "_")
}

fn module_in(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    plain(name.split('.').next().unwrap_or(name))
}

/// Loads one of those that are kept for later, or else from the disk of modules.
pub(super) fn load_kept(name: &str) -> io::Result<()> {
    let ending = format!("-{name}.ko");
    let kept = fs::read_dir(KEPT_MODULES).into_iter().flatten().flatten();
    let found = kept
        .map(|file| file.path())
        .find(|path| path.as_os_str().as_encoded_bytes().ends_with(ending.as_bytes()));
    match found {
        Some(path) => load(&path),
        None => load_by_name(name),
    }
}

/// Loads every module of a folder, in the order of their names.
pub(super) fn load_all(folder: &str) {
    let mut files: Vec<_> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|f| f.path())
        .collect();
    files.sort();
    for path in files {
        if let Err(e) = load(&path) {
            log!("{} is not loaded: {e}", path.display());
        }
    }
}

/// One that is loaded already need not be again.
fn load(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    // SAFETY: the parameters are an empty string, and the descriptor is open.
    let done = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    match check(done as libc::c_int) {
        Err(e) if e.raw_os_error() != Some(libc::EEXIST) => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIASES: &str = "# Aliases extracted from modules themselves.\nalias fs-ext3 ext3\nalias net-pf-16-proto-12 nfnetlink\n\
        alias nft-chain-2-nat nft_chain_nat\nalias ip6t_MASQUERADE xt_MASQUERADE\n";
    const NEEDS: &str = "kernel/net/netfilter/nfnetlink.ko:\nkernel/net/netfilter/nf_nat.ko: kernel/net/nf_conntrack.ko kernel/lib/libcrc32c.ko\n\
        kernel/net/netfilter/nft_chain_nat.ko: kernel/net/netfilter/nf_nat.ko kernel/net/nf_conntrack.ko kernel/lib/libcrc32c.ko\n";

    #[test]
    fn what_a_module_needs_is_loaded_before_it() {
        let files = files_for("nft-chain-2-nat", ALIASES, NEEDS);
        let names: Vec<String> = files.into_iter().map(module_in).collect();
        assert_eq!(names, ["libcrc32c", "nf_conntrack", "nf_nat", "nft_chain_nat"]);
    }

    #[test]
    fn a_module_has_its_name_with_either_dash_and_its_aliases() {
        for name in ["nfnetlink", "net-pf-16-proto-12"] {
            assert_eq!(
                files_for(name, ALIASES, NEEDS),
                ["kernel/net/netfilter/nfnetlink.ko"]
            );
        }
        assert_eq!(files_for("nf-nat", ALIASES, NEEDS).len(), 3);
        assert!(files_for("net-pf-16", ALIASES, NEEDS).is_empty());
        assert!(
            files_for("ip6t_MASQUERADE", ALIASES, NEEDS).is_empty(),
            "it is not there"
        );
    }
}
