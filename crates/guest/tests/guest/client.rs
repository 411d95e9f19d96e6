//! A guest of its own for every test, and just enough of an HTTP client to talk to it.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Nothing here takes long; what does is stuck.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Guest {
    child: Child,
    folder: tempfile::TempDir,
    connect: Box<dyn Fn() -> UnixStream + Send + Sync>,
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

impl Guest {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Runs of other users must be able to reach what tests put here.
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let socket = folder.path().join("socket");
        let child = Command::new(env!("CARGO_BIN_EXE_dorm-guest"))
            .arg("--standalone")
            .arg(&socket)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        while UnixStream::connect(&socket).is_err() {
            assert!(Instant::now() < deadline, "the guest does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self {
            child,
            folder,
            connect: Box::new(move || UnixStream::connect(&socket).unwrap()),
        }
    }

    /// A guest that was started otherwise, and how to reach it.
    pub(crate) fn of(child: Child, connect: impl Fn() -> UnixStream + Send + Sync + 'static) -> Self {
        Self {
            child,
            folder: tempfile::tempdir().unwrap(),
            connect: Box::new(connect),
        }
    }

    /// A folder for the test's own files.
    pub(crate) fn folder(&self) -> PathBuf {
        let folder = self.folder.path().join("files");
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.folder.path().join("socket.d")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }

    fn connect(&self) -> UnixStream {
        let stream = (self.connect)();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Incoming {
        let mut stream = self.connect();
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("Content-Length: {}\r\n\r\n", body.len()));
        stream.write_all(head.as_bytes()).unwrap();
        // The guest may answer before it has read everything.
        let _ = stream.write_all(body);
        Incoming::read(stream)
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        self.send(method, path, headers, body).collect()
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[], b"")
    }

    pub(crate) fn unary(&self, method: &str, request: &Value, headers: &[(&str, &str)]) -> Answer {
        let headers = [&[("Content-Type", "application/json")], headers].concat();
        self.request(
            "POST",
            &format!("/{method}"),
            &headers,
            request.to_string().as_bytes(),
        )
    }

    /// A unary call that must succeed.
    pub(crate) fn call(&self, method: &str, request: &Value) -> Value {
        let answer = self.unary(method, request, &[]);
        assert_eq!(answer.status, 200, "{method} {request}: {}", answer.text());
        answer.json()
    }

    /// The error code of a unary call that must fail.
    pub(crate) fn refused(&self, method: &str, request: &Value) -> (String, String) {
        let answer = self.unary(method, request, &[]);
        assert_ne!(answer.status, 200, "{method} {request} should have failed");
        let error = answer.json();
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        (text("code"), text("message"))
    }

    pub(crate) fn stream(&self, method: &str, request: &Value, headers: &[(&str, &str)]) -> Events {
        let headers = [&[("Content-Type", "application/connect+json")], headers].concat();
        let body = envelope(request.to_string().as_bytes());
        let incoming = self.send("POST", &format!("/{method}"), &headers, &body);
        assert_eq!(incoming.status, 200, "a stream starts with 200, whatever comes");
        Events {
            incoming,
            error: None,
            ended: false,
        }
    }

    pub(crate) fn start_run(&self, request: &Value) -> Events {
        self.stream("process.Process/Start", request, &[])
    }

    /// Runs a shell command to its end.
    pub(crate) fn shell(&self, script: &str) -> Output {
        self.start_run(&shell(script)).output()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // Asked first, so that it ends the runs that a test has left behind.
        // SAFETY: kill takes two integers; the child is not reaped yet, so that the pid is its own.
        unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGTERM) };
        let deadline = Instant::now() + Duration::from_secs(3);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a client sends to run a script.
pub(crate) fn shell(script: &str) -> Value {
    json!({"process": {"cmd": "/bin/bash", "args": ["-c", script]}, "stdin": false})
}

/// `value` with the fields of `more`.
pub(crate) fn with(mut value: Value, more: Value) -> Value {
    for (key, field) in more.as_object().unwrap() {
        value[key] = field.clone();
    }
    value
}

pub(crate) fn envelope(message: &[u8]) -> Vec<u8> {
    let mut framed = vec![0];
    framed.extend((message.len() as u32).to_be_bytes());
    framed.extend(message);
    framed
}

/// An answer whose body is still coming.
pub(crate) struct Incoming {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    stream: BufReader<UnixStream>,
    chunked: bool,
    left: usize,
    done: bool,
}

impl Incoming {
    fn read(stream: UnixStream) -> Self {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        let status = line
            .split(' ')
            .nth(1)
            .unwrap_or_else(|| panic!("no status in {line:?}"))
            .parse()
            .unwrap();
        let mut headers = HashMap::new();
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                break;
            };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let chunked = headers.get("transfer-encoding").is_some_and(|v| v == "chunked");
        let left = headers.get("content-length").map_or(0, |v| v.parse().unwrap());
        Self {
            status,
            headers,
            stream,
            chunked,
            left,
            done: !chunked && left == 0,
        }
    }

    fn collect(mut self) -> Answer {
        let mut body = Vec::new();
        self.read_to_end(&mut body).unwrap();
        Answer {
            status: self.status,
            headers: self.headers,
            body,
        }
    }
}

impl Read for Incoming {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        if self.done {
            return Ok(0);
        }
        if self.chunked && self.left == 0 {
            let mut line = String::new();
            self.stream.read_line(&mut line)?;
            if line.trim().is_empty() {
                line.clear();
                self.stream.read_line(&mut line)?;
            }
            self.left = usize::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
            if self.left == 0 {
                self.done = true;
                return Ok(0);
            }
        }
        let want = buf.len().min(self.left);
        let n = self.stream.read(&mut buf[..want])?;
        if n == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= n;
        self.done = self.left == 0 && !self.chunked;
        Ok(n)
    }
}

/// The messages of a server stream.
pub(crate) struct Events {
    incoming: Incoming,
    pub(crate) error: Option<Value>,
    ended: bool,
}

impl Iterator for Events {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        if self.ended {
            return None;
        }
        let mut header = [0; 5];
        self.incoming.read_exact(&mut header).unwrap();
        let len = u32::from_be_bytes(header[1..].try_into().unwrap()) as usize;
        let mut message = vec![0; len];
        self.incoming.read_exact(&mut message).unwrap();
        let message: Value = serde_json::from_slice(&message).unwrap();
        if header[0] & 2 != 0 {
            self.ended = true;
            self.error = message.get("error").cloned();
            return None;
        }
        Some(message)
    }
}

/// All that a run gave.
#[derive(Debug, Default)]
pub(crate) struct Output {
    pub(crate) pid: u64,
    pub(crate) run_id: String,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) pty: String,
    pub(crate) bytes: usize,
    pub(crate) end: Value,
    pub(crate) error: Value,
}

impl Output {
    pub(crate) fn code(&self) -> i64 {
        self.end["exitCode"]
            .as_i64()
            .unwrap_or_else(|| -i64::from(self.end["exited"] != true))
    }
}

pub(crate) fn bytes_of(value: &Value) -> Vec<u8> {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD
        .decode(value.as_str().unwrap())
        .unwrap()
}

pub(crate) fn base64(data: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(data)
}

impl Events {
    /// The next event of a run.
    pub(crate) fn event(&mut self) -> Option<Value> {
        self.next().map(|m| m["event"].clone())
    }

    /// The pid, from the first event.
    pub(crate) fn started(&mut self) -> (u64, String) {
        let event = self
            .event()
            .unwrap_or_else(|| panic!("no start: {:?}", self.error));
        let start = &event["start"];
        (
            start["pid"].as_u64().unwrap(),
            start["runId"].as_str().unwrap().to_owned(),
        )
    }

    /// Reads until the output so far holds `text`.
    pub(crate) fn until(&mut self, text: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(text) {
            let event = self
                .event()
                .unwrap_or_else(|| panic!("ended with {seen:?}, {:?}", self.error));
            for stream in ["stdout", "stderr", "pty"] {
                if event["data"][stream].is_string() {
                    seen.push_str(&String::from_utf8_lossy(&bytes_of(&event["data"][stream])));
                }
            }
            assert!(event.get("end").is_none(), "ended with {seen:?}: {event}");
        }
        seen
    }

    /// Reads to the end.
    pub(crate) fn output(mut self) -> Output {
        let mut output = Output::default();
        let (mut stdout, mut stderr, mut pty) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(event) = self.event() {
            if let Some(start) = event.get("start") {
                output.pid = start["pid"].as_u64().unwrap_or(0);
                output.run_id = start["runId"].as_str().unwrap_or_default().to_owned();
            }
            for (name, bytes) in [
                ("stdout", &mut stdout),
                ("stderr", &mut stderr),
                ("pty", &mut pty),
            ] {
                if event["data"][name].is_string() {
                    bytes.extend(bytes_of(&event["data"][name]));
                }
            }
            if let Some(end) = event.get("end") {
                output.end = end.clone();
            }
        }
        output.bytes = stdout.len() + stderr.len() + pty.len();
        output.stdout = String::from_utf8_lossy(&stdout).into_owned();
        output.stderr = String::from_utf8_lossy(&stderr).into_owned();
        output.pty = String::from_utf8_lossy(&pty).into_owned();
        output.error = self.error.unwrap_or_default();
        output
    }
}

/// Waits until something holds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn alive(pid: u64) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "))
}

/// A path as a query needs it.
pub(crate) fn quoted(path: &Path) -> String {
    percent_encoding::utf8_percent_encode(path.to_str().unwrap(), percent_encoding::NON_ALPHANUMERIC)
        .to_string()
}
