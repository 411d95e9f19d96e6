//! Paths as clients write them.

use std::path::{Component, Path, PathBuf};

use crate::users::User;

/// The absolute path that is meant: `~` and relative paths start at the user's home.
pub(crate) fn resolve(user: &User, path: &str) -> PathBuf {
    let path = match path.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => {
            user.home.join(rest.trim_start_matches('/'))
        }
        _ => user.home.join(path),
    };
    let mut clean = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => drop(clean.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    clean
}

/// The last part of a path, or `/` itself.
pub(crate) fn name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_start_at_home_unless_absolute() {
        let mut user = crate::users::find("root").unwrap();
        user.home = "/home/user".into();
        for (given, meant) in [
            ("a/b", "/home/user/a/b"),
            ("", "/home/user"),
            ("~", "/home/user"),
            ("~/x", "/home/user/x"),
            ("~x", "/home/user/~x"),
            ("/etc//./passwd", "/etc/passwd"),
            ("../../../../etc", "/etc"),
            ("/", "/"),
        ] {
            assert_eq!(resolve(&user, given), Path::new(meant), "{given}");
        }
    }
}
