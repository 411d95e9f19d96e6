//! Calls of `process.Process`: start runs, follow them, feed and signal them.

use anyhow::Result;
use serde::Deserialize;
use serde_json::json;

use super::connect::Stream;
use super::guest::Guest;
use super::wire::{Base64, End, Event, EventAnswer, Pty, Run, Selector, StartRequest, WindowSize};

/// The events of one run.
pub(crate) struct Events(Stream);

impl Events {
    pub(crate) async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            match self.0.next::<EventAnswer>().await? {
                Some(EventAnswer {
                    event: Some(Event::Keepalive {}) | None,
                }) => {}
                Some(EventAnswer { event }) => return Ok(event),
                None => return Ok(None),
            }
        }
    }
}

impl Guest<'_> {
    pub(crate) async fn start(&self, request: &StartRequest) -> Result<Events> {
        Ok(Events(self.stream("process.Process/Start", request).await?))
    }

    /// Attaches to a run, with its kept output from byte `from` on.
    pub(crate) async fn attach(&self, run: &Selector, from: u64) -> Result<Events> {
        let request = json!({"process": run, "replayFrom": from.to_string()});
        Ok(Events(self.stream("process.Process/Connect", &request).await?))
    }

    pub(crate) async fn runs(&self, ended: bool) -> Result<Vec<Run>> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(default)]
            processes: Vec<Run>,
        }
        let answer: Answer = self
            .call("process.Process/List", &json!({"ended": ended}))
            .await?;
        Ok(answer.processes)
    }

    pub(crate) async fn send_input(&self, run: &Selector, data: &[u8], pty: bool) -> Result<()> {
        let request = json!({"process": run, "input": input(data, pty)});
        self.call::<Ignored>("process.Process/SendInput", &request)
            .await?;
        Ok(())
    }

    /// As often as need be, for data that begins at `offset` of all that is sent so.
    pub(crate) async fn feed_input(&self, run: &Selector, data: &[u8], pty: bool, offset: u64) -> Result<()> {
        let request = json!({"process": run, "input": input(data, pty), "offset": offset.to_string()});
        self.call::<Ignored>("process.Process/FeedInput", &request)
            .await?;
        Ok(())
    }

    pub(crate) async fn close_stdin(&self, run: &Selector) -> Result<()> {
        self.call::<Ignored>("process.Process/CloseStdin", &json!({"process": run}))
            .await?;
        Ok(())
    }

    /// To the whole process group, as the terminal's driver would.
    pub(crate) async fn signal(&self, run: &Selector, number: i32) -> Result<()> {
        let request = json!({"process": run, "number": number, "group": true});
        self.call::<Ignored>("process.Process/SendSignal", &request)
            .await?;
        Ok(())
    }

    pub(crate) async fn resize(&self, run: &Selector, size: WindowSize) -> Result<()> {
        let request = json!({"process": run, "pty": Pty { size }});
        self.call::<Ignored>("process.Process/Update", &request).await?;
        Ok(())
    }

    /// Runs a command to its end and returns its output and how it ended.
    pub(crate) async fn run(&self, request: &StartRequest) -> Result<(Vec<u8>, Vec<u8>, End)> {
        let mut events = self.start(request).await?;
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        while let Some(event) = events.next().await? {
            match event {
                Event::Data(data) => {
                    stdout.extend(data.stdout.or(data.pty).unwrap_or_default().0);
                    stderr.extend(data.stderr.unwrap_or_default().0);
                }
                Event::End(end) => return Ok((stdout, stderr, end)),
                Event::Start(_) | Event::Keepalive {} => {}
            }
        }
        anyhow::bail!("the guest did not say how `{}` ended", request.process.cmd)
    }
}

fn input(data: &[u8], pty: bool) -> serde_json::Value {
    let data = Base64(data.to_vec());
    match pty {
        true => json!({"pty": data}),
        false => json!({"stdin": data}),
    }
}

#[derive(Deserialize)]
struct Ignored {}
