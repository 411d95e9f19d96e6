//! From what a client asks for to a [`Launch`]: program, arguments, environment, folder, user, limits.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use connectrpc::ConnectError;
use dorm_proto::process::{ProcessConfig, RunLimits};

use super::spawn::{Launch, SpawnError, Step};
use crate::settings::Settings;
use crate::users::User;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn c_string(bytes: &[u8], what: &str) -> Result<CString, ConnectError> {
    CString::new(bytes).map_err(|_| ConnectError::invalid_argument(format!("{what} holds a NUL byte")))
}

/// The environment of a run, weakest first: the user's, the box's, the run's own.
fn environment(
    settings: &Settings,
    config: &ProcessConfig,
    user: &User,
    terminal: bool,
) -> BTreeMap<String, String> {
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
        ("HOME".to_owned(), user.home.to_string_lossy().into_owned()),
        ("USER".to_owned(), user.name.clone()),
        ("LOGNAME".to_owned(), user.name.clone()),
        ("SHELL".to_owned(), user.shell.clone()),
    ]);
    if terminal {
        env.insert("TERM".into(), "xterm-256color".into());
    }
    env.extend(settings.env());
    env.extend(config.envs.iter().map(|(k, v)| (k.clone(), v.clone())));
    env
}

/// The files that `cmd` may mean, in the order in which they are tried.
fn programs(cmd: &str, path: &str) -> Result<Vec<CString>, ConnectError> {
    if cmd.contains('/') {
        return Ok(vec![c_string(cmd.as_bytes(), "the command")?]);
    }
    path.split(':')
        .map(|dir| if dir.is_empty() { "." } else { dir })
        .map(|dir| c_string(format!("{dir}/{cmd}").as_bytes(), "the command"))
        .collect()
}

fn limits(limits: &RunLimits) -> Vec<(libc::__rlimit_resource_t, u64)> {
    [
        (libc::RLIMIT_CPU, limits.cpu_seconds),
        (libc::RLIMIT_AS, limits.memory_bytes),
        (libc::RLIMIT_NOFILE, limits.open_files),
        (libc::RLIMIT_FSIZE, limits.file_bytes),
        (libc::RLIMIT_NPROC, limits.processes),
    ]
    .into_iter()
    .filter_map(|(resource, value)| Some((resource, value?)))
    .collect()
}

pub(super) fn launch(
    settings: &Settings,
    config: &ProcessConfig,
    user: &User,
    run_limits: Option<&RunLimits>,
    terminal: bool,
) -> Result<Launch, ConnectError> {
    if config.cmd.is_empty() {
        return Err(ConnectError::invalid_argument("the command is empty"));
    }
    let env = environment(settings, config, user, terminal);
    if let Some(name) = env.keys().find(|k| k.is_empty() || k.contains('=')) {
        return Err(ConnectError::invalid_argument(format!(
            "'{name}' cannot be the name of a variable"
        )));
    }
    let (cwd, fallback) = match config.cwd.as_deref().filter(|c| !c.is_empty()) {
        Some(cwd) => (crate::files::path::resolve(user, cwd), None),
        None => {
            let cwd = settings
                .default_workdir()
                .map_or_else(|| user.home.clone(), Into::into);
            (cwd, Some(c"/".to_owned()))
        }
    };
    let mut args = vec![c_string(config.cmd.as_bytes(), "the command")?];
    for arg in &config.args {
        args.push(c_string(arg.as_bytes(), "an argument")?);
    }
    let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    Ok(Launch {
        programs: programs(&config.cmd, path)?,
        args,
        env: env
            .iter()
            .map(|(k, v)| c_string(format!("{k}={v}").as_bytes(), "the environment"))
            .collect::<Result<_, _>>()?,
        cwd: c_string(cwd.as_os_str().as_bytes(), "the working folder")?,
        cwd_fallback: fallback,
        uid: user.uid,
        gid: user.gid,
        groups: user.groups.clone(),
        stdio: [-1; 3],
        terminal,
        limits: run_limits.map(limits).unwrap_or_default(),
    })
}

/// Says in words why nothing was started.
pub(super) fn refusal(error: &SpawnError, launch: &Launch, user: &User) -> ConnectError {
    let cmd = launch.args[0].to_string_lossy();
    let cwd = launch.cwd.to_string_lossy();
    let source = &error.source;
    let errno = source.raw_os_error().unwrap_or(0);
    match (error.step, errno) {
        (Step::Clone, libc::EAGAIN) => {
            ConnectError::resource_exhausted("no process can be started: the box is at its process limit")
        }
        (Step::Clone | Step::Exec, libc::ENOMEM) => {
            ConnectError::resource_exhausted("no process can be started: the box is out of memory")
        }
        (Step::Folder, libc::ENOENT) => ConnectError::invalid_argument(format!("cwd '{cwd}' does not exist")),
        (Step::Folder, libc::ENOTDIR) => {
            ConnectError::invalid_argument(format!("cwd '{cwd}' is not a folder"))
        }
        (Step::Folder, _) => ConnectError::permission_denied(format!(
            "cwd '{cwd}' cannot be entered by '{}': {source}",
            user.name
        )),
        (Step::Exec, libc::ENOENT) if cmd.contains('/') && Path::new(&*cmd).exists() => {
            ConnectError::failed_precondition(format!("'{cmd}' names an interpreter that does not exist"))
        }
        (Step::Exec, libc::ENOENT | libc::ENOTDIR) => {
            ConnectError::not_found(format!("command not found: {cmd}"))
        }
        (Step::Exec, libc::EACCES) => {
            ConnectError::permission_denied(format!("'{cmd}' cannot be executed by '{}'", user.name))
        }
        (Step::Exec, libc::ENOEXEC) => {
            ConnectError::invalid_argument(format!("'{cmd}' is not a program, nor a script with '#!'"))
        }
        (Step::Exec, libc::E2BIG) => {
            ConnectError::invalid_argument("the arguments and the environment are too long together")
        }
        (Step::Exec, libc::EAGAIN) => {
            ConnectError::resource_exhausted(format!("'{}' is at its process limit", user.name))
        }
        (Step::Exec, _) => ConnectError::invalid_argument(format!("'{cmd}' cannot be executed: {source}")),
        (step, _) => ConnectError::internal(format!("'{cmd}' cannot be started ({step:?}): {source}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_name_is_looked_for_along_the_path() {
        let found = programs("ls", "/a::/b").unwrap();
        assert_eq!(
            found,
            [c"/a/ls".to_owned(), c"./ls".to_owned(), c"/b/ls".to_owned()]
        );
        assert_eq!(programs("./x/ls", "/a").unwrap(), [c"./x/ls".to_owned()]);
        assert!(programs("l\0s", "/a").is_err());
    }

    #[test]
    fn the_runs_own_variables_win_over_the_boxes_and_those_over_the_users() {
        let settings = Settings::default();
        settings.add_env([("PATH".into(), "/box".into()), ("A".into(), "box".into())]);
        let mut config = ProcessConfig {
            cmd: "x".into(),
            ..Default::default()
        };
        config.envs.insert("A".into(), "run".into());
        let user = crate::users::find("root").unwrap();
        let env = environment(&settings, &config, &user, true);
        assert_eq!(env["PATH"], "/box");
        assert_eq!(env["A"], "run");
        assert_eq!(env["USER"], "root");
        assert_eq!(env["TERM"], "xterm-256color");
    }
}
