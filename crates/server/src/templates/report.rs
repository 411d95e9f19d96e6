//! Tells whoever asked how a template comes along, and keeps the same in a log file.

use std::collections::VecDeque;
use std::path::Path;

use dorm_engine::LogSink;
use tokio::fs::File;
use tokio::io::{AsyncWriteExt as _, BufWriter};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Result, TemplateError};
use crate::api::types::Progress;

/// Lines kept for the message of a failed step.
const TAIL: usize = 20;
const MAX_LINE: usize = 16 * 1024;
/// What is kept of a log, which lies outside of every quota.
const MAX_LOG: usize = 64 << 20;

pub(super) struct Report {
    to: mpsc::Sender<Progress>,
    log: BufWriter<File>,
    logged: usize,
    tail: VecDeque<String>,
    step: u32,
    steps: u32,
    title: String,
    closed: CancellationToken,
}

impl Report {
    pub(super) async fn new(
        to: mpsc::Sender<Progress>,
        log: &Path,
        closed: CancellationToken,
    ) -> Result<Self> {
        if let Some(directory) = log.parent() {
            tokio::fs::create_dir_all(directory)
                .await
                .map_err(TemplateError::io("make the directory of logs"))?;
        }
        let log = File::create(log)
            .await
            .map_err(TemplateError::io("write the log"))?;
        let log = BufWriter::new(log);
        Ok(Self {
            to,
            log,
            logged: 0,
            tail: VecDeque::new(),
            step: 0,
            steps: 0,
            title: String::new(),
            closed,
        })
    }

    /// Begins to count anew, up to `steps`.
    pub(super) fn plan(&mut self, steps: usize) {
        (self.step, self.steps) = (0, u32::try_from(steps).unwrap_or(u32::MAX));
    }

    pub(super) async fn step(&mut self, title: impl Into<String>) {
        self.step += 1;
        self.title = title.into();
        self.tail.clear();
        self.write(&format!("[{}/{}] {}", self.step, self.steps, self.title))
            .await;
        let _ = self.log.flush().await;
        let step = Progress::Step {
            step: self.step,
            steps: self.steps,
            title: self.title.clone(),
        };
        let _ = self.to.send(step).await;
    }

    pub(super) async fn line(&mut self, line: impl Into<String>) {
        let line = line.into();
        self.write(&line).await;
        self.tail.push_back(line.clone());
        if self.tail.len() > TAIL {
            self.tail.pop_front();
        }
        let _ = self.to.send(Progress::Log { line }).await;
    }

    pub(super) fn tail(&self) -> Vec<String> {
        self.tail.iter().cloned().collect()
    }

    /// The error as one of the present step.
    pub(super) fn failed(&self, source: TemplateError) -> TemplateError {
        if self.step == 0 {
            return source;
        }
        let title = self.title.clone();
        TemplateError::Step {
            step: self.step,
            steps: self.steps,
            title,
            source: Box::new(source),
        }
    }

    pub(super) async fn end(mut self, with: Progress) {
        match &with {
            Progress::Error { error } => self.write(&format!("error: {}", error.message)).await,
            Progress::Done { .. } => self.write("done").await,
            Progress::Step { .. } | Progress::Log { .. } => {}
        }
        let _ = self.log.flush().await;
        let _ = self.to.send(with).await;
    }

    /// Does `work`, whose log lines come in by a channel.
    pub(super) async fn following<T, F>(&mut self, work: impl FnOnce(LogSink) -> F) -> T
    where
        F: Future<Output = T>,
    {
        let (sink, mut lines) = mpsc::unbounded_channel();
        let work = work(sink);
        tokio::pin!(work);
        let done = loop {
            tokio::select! {
                biased;
                Some(line) = lines.recv() => self.line(line).await,
                done = &mut work => break done,
            }
        };
        while let Ok(line) = lines.try_recv() {
            self.line(line).await;
        }
        done
    }

    /// Resolves when nobody waits for the outcome any more, or the daemon is to end.
    pub(super) fn abandoned(&self) -> impl Future<Output = ()> + Send + 'static {
        let (to, closed) = (self.to.clone(), self.closed.clone());
        async move {
            tokio::select! {
                () = to.closed() => {}
                () = closed.cancelled() => {}
            }
        }
    }

    /// The log is for people: it is no reason to fail.
    async fn write(&mut self, line: &str) {
        let was_room = self.logged < MAX_LOG;
        self.logged = self.logged.saturating_add(line.len() + 1);
        let line = match (was_room, self.logged < MAX_LOG) {
            (true, true) => line,
            (true, false) => "the rest is not kept: the log is too long",
            (false, _) => return,
        };
        let _ = self.log.write_all(line.as_bytes()).await;
        let _ = self.log.write_all(b"\n").await;
    }
}

/// Makes lines of output. Of a line that is written over and over, as by progress bars, the last state counts.
#[derive(Default)]
pub(super) struct Lines {
    line: Vec<u8>,
    /// Whether the next character begins the line anew.
    returned: bool,
}

impl Lines {
    pub(super) fn push(&mut self, output: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        for byte in output {
            match byte {
                b'\n' => lines.extend(self.rest()),
                b'\r' => self.returned = true,
                byte => {
                    if std::mem::take(&mut self.returned) {
                        self.line.clear();
                    }
                    self.line.push(*byte);
                    if self.line.len() >= MAX_LINE {
                        lines.extend(self.rest());
                    }
                }
            }
        }
        lines
    }

    pub(super) fn rest(&mut self) -> Option<String> {
        self.returned = false;
        let line = std::mem::take(&mut self.line);
        (!line.is_empty()).then(|| String::from_utf8_lossy(&line).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::Lines;

    #[test]
    fn output_becomes_lines_wherever_it_is_cut() {
        let mut lines = Lines::default();
        assert_eq!(lines.push(b"one\r\ntw"), ["one"]);
        assert_eq!(lines.push(b"o\n10%\r20%\r"), ["two"]);
        assert_eq!(lines.push(b"30%\n\nthr"), ["30%"]);
        assert_eq!(lines.rest().as_deref(), Some("thr"));
        assert_eq!(lines.rest(), None);
    }
}
