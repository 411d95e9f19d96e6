//! nginx as a plain file server, where it is installed.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// Far beyond what it takes to listen.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Nginx {
    process: Child,
    pub(super) address: SocketAddr,
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Nginx {
    /// Gives and takes files in a folder of its own below `folder`. `None` if there is no nginx.
    pub(super) fn start(folder: &Path) -> Result<Option<Self>> {
        let found = Command::new("nginx").arg("-v").stderr(Stdio::null()).status();
        if found.is_err() {
            return Ok(None);
        }
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let (folder, file) = (folder.display(), folder.join("nginx.conf"));
        std::fs::create_dir(format!("{folder}/files"))?;
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {folder}/{kind};\n"))
            .concat();
        let config = format!(
            "daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;\n\
             events {{}}\n\
             http {{ access_log off; sendfile on; client_max_body_size 0; client_body_buffer_size 256k;\n{temporary}\
             server {{ listen {address}; root {folder}/files; dav_methods PUT; }} }}\n"
        );
        std::fs::write(&file, config)?;
        let process = Command::new("nginx")
            .arg("-c")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("nginx does not start")?;
        let mut nginx = Self { process, address };
        let begun = Instant::now();
        while TcpStream::connect(address).is_err() {
            let ended = nginx.process.try_wait()?.is_some();
            ensure!(!ended && begun.elapsed() < PATIENCE, "nginx does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Some(nginx))
    }
}
