//! The progress of builds and imports: a bar with steps on a terminal, lines elsewhere.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::{Context, Result};
use dorm_server::api::types::{ErrorBody, Progress, Template};
use http::Response;
use hyper::body::Incoming;
use indicatif::ProgressBar;

use crate::client::events::lines;
use crate::client::guest::chunks;
use crate::exit::{Exit, Failure};
use crate::output::printable;
use crate::{output, progress};

/// How much of the log an error comes with.
const LAST_LINES: usize = 20;

/// Shows the answer until the work is done or has failed.
pub(crate) async fn follow(
    response: Response<Incoming>,
    name: &str,
    verbose: bool,
    json: bool,
) -> Result<()> {
    let begun = Instant::now();
    let mut lines = lines(chunks(response.into_body()));
    let mut view = View {
        bar: if json {
            ProgressBar::hidden()
        } else {
            progress::steps(name)
        },
        lines: json || verbose || !progress::on_terminal(),
        steps: !json && !progress::on_terminal(),
        last: VecDeque::new(),
        json,
    };
    let mut worked = false;
    while let Some(line) = lines.next_line().await.context("the daemon's answer broke off")? {
        if line.trim().is_empty() {
            continue;
        }
        let event: Progress = serde_json::from_str(&line).context("the daemon's answer is not understood")?;
        if json {
            output::json_line(&event)?;
        }
        match event {
            Progress::Step { step, steps, title } => {
                worked = true;
                view.step(step, steps, &title);
            }
            Progress::Log { line } => view.log(line),
            Progress::Done { template, .. } => {
                view.bar.finish_and_clear();
                return if json {
                    Ok(())
                } else {
                    done(&template, worked, begun)
                };
            }
            Progress::Error { error } => {
                view.bar.finish_and_clear();
                return Err(view.failure(error, name).into());
            }
        }
    }
    let broken = Failure::new(
        Exit::Unreachable,
        "the daemon's answer broke off before the template was done",
    );
    Err(broken
        .hint("the daemon may have ended; run the command again")
        .into())
}

fn done(template: &Template, worked: bool, begun: Instant) -> Result<()> {
    let size = crate::size::Size(template.size);
    let how = if worked {
        format!("is ready after {:.1} s", begun.elapsed().as_secs_f64())
    } else {
        "is there already".to_owned()
    };
    output::line(format!("{} {how} ({size}, id {})", template.name, template.id))
}

struct View {
    bar: ProgressBar,
    /// Log lines are shown as they come.
    lines: bool,
    /// Steps are lines of their own.
    steps: bool,
    last: VecDeque<String>,
    /// All of it goes out as JSON instead.
    json: bool,
}

impl View {
    fn step(&mut self, step: u32, steps: u32, title: &str) {
        self.bar.set_length(steps.into());
        self.bar.set_position(step.saturating_sub(1).into());
        self.bar.set_message(title.to_owned());
        if self.steps {
            eprintln!("[{step}/{steps}] {title}");
        }
    }

    fn log(&mut self, line: String) {
        if self.lines && !self.json {
            // Above the bar, where there is one.
            self.bar.suspend(|| eprintln!("  {}", printable(&line)));
        }
        if self.last.len() == LAST_LINES {
            self.last.pop_front();
        }
        self.last.push_back(line);
    }

    /// The error as the command's own. Log lines come with it once: shown already, in the daemon's hint, or here.
    fn failure(&self, error: ErrorBody, name: &str) -> Failure {
        let exit = Exit::from_code(&error.code).unwrap_or(Exit::Error);
        let whole = format!("the whole log: dorm template log {name}");
        let last = self
            .last
            .back()
            .map(String::as_str)
            .filter(|line| !line.is_empty());
        let quotes = |hint: &str| last.is_some_and(|last| hint.ends_with(last));
        let hint = match error.hint {
            Some(hint) if !quotes(&hint) => hint,
            _ => whole,
        };
        if !self.lines {
            self.last
                .iter()
                .for_each(|line| eprintln!("  {}", printable(line)));
        }
        Failure::new(exit, error.message).hint(hint)
    }
}
