//! Progress on stderr: a bar on a terminal, and nothing or plain lines elsewhere.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub(crate) fn on_terminal() -> bool {
    std::io::stderr().is_terminal()
}

fn target() -> ProgressDrawTarget {
    if on_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    }
}

/// Counts bytes; without a known total it shows how many have passed.
pub(crate) fn transfer(label: &str, total: Option<u64>) -> ProgressBar {
    let template = match total {
        Some(_) => "{msg} {bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}",
        None => "{spinner} {msg} {bytes} {binary_bytes_per_sec}",
    };
    let bar = ProgressBar::with_draw_target(total, target()).with_message(label.to_owned());
    bar.set_style(style(template));
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// Counts steps of long work, with the elapsed time.
pub(crate) fn steps(label: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(0), target()).with_prefix(label.to_owned());
    bar.set_style(style(
        "{spinner} {prefix} {bar:20} {pos}/{len} {elapsed} {wide_msg}",
    ));
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// For work of unknown length.
pub(crate) fn spinner(label: impl Into<String>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, target()).with_message(label.into());
    bar.set_style(style("{spinner} {msg} {elapsed}"));
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .expect("the templates in this file are well-formed")
        .progress_chars("=> ")
}
