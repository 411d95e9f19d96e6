//! What commands print: tables for people, JSON for programs. A reader that has gone away ends the
//! command quietly instead of with an error.

use std::borrow::Cow;
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use serde::Serialize;

use crate::exit::BROKEN_PIPE;

/// Turns a failed write to stdout into a quiet end where the reader has gone.
pub(crate) fn stdout_error(error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::BrokenPipe {
        BROKEN_PIPE.into()
    } else {
        anyhow::Error::new(error).context("cannot write to stdout")
    }
}

pub(crate) fn bytes(data: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(data)
        .and_then(|()| out.flush())
        .map_err(stdout_error)
}

pub(crate) fn line(text: impl AsRef<str>) -> Result<()> {
    bytes(format!("{}\n", text.as_ref()).as_bytes())
}

pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    line(serde_json::to_string_pretty(value)?)
}

/// One value per line, for streams.
pub(crate) fn json_line(value: &impl Serialize) -> Result<()> {
    line(serde_json::to_string(value)?)
}

/// Text from a box or from the daemon without what would steer the terminal.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let steers = |c: char| c.is_control() && c != '\n' && c != '\t';
    if text.contains(steers) {
        text.replace(steers, "\u{fffd}").into()
    } else {
        text.into()
    }
}

/// Rows under headings, in columns as wide as their widest cell.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// A heading that begins with `>` sets its column flush right.
    pub(crate) fn new<const N: usize>(headings: [&str; N]) -> Self {
        Self {
            right: headings.iter().map(|h| h.starts_with('>')).collect(),
            rows: vec![
                headings
                    .iter()
                    .map(|h| h.trim_start_matches('>').to_owned())
                    .collect(),
            ],
        }
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(
            cells
                .iter()
                .map(|cell| printable(cell).replace(['\n', '\t'], " "))
                .collect(),
        );
    }

    pub(crate) fn render(&self) -> String {
        let columns = self.right.len();
        let widths: Vec<usize> = (0..columns)
            .map(|c| self.rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (c, cell) in row.iter().enumerate() {
                if c > 0 {
                    line += "  ";
                }
                let width = widths[c];
                line += &if self.right[c] {
                    format!("{cell:>width$}")
                } else {
                    format!("{cell:<width$}")
                };
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }

    pub(crate) fn print(&self) -> Result<()> {
        bytes(self.render().as_bytes())
    }
}

/// `name: value` lines, values in one column.
pub(crate) fn fields(pairs: &[(&str, String)]) -> Result<()> {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 1;
    let mut text = String::new();
    for (name, value) in pairs {
        text += format!("{:width$} {}", format!("{name}:"), printable(value)).trim_end();
        text.push('\n');
    }
    bytes(text.as_bytes())
}

pub(crate) fn now_millis() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_millis() as i64)
}

/// `12s`, `5m`, `3h`, `9d`: how long ago a time in milliseconds was.
pub(crate) fn age(millis: i64) -> String {
    short_duration((now_millis() - millis).max(0) / 1000)
}

pub(crate) fn short_duration(seconds: i64) -> String {
    match seconds {
        s @ ..60 => format!("{s}s"),
        s @ ..3600 => format!("{}m", s / 60),
        s @ ..86400 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86400),
    }
}

/// A time to wait, in seconds, as it may be given: `0.4s`, `90s`, `15m`; 0 is `never`.
pub(crate) fn wait(seconds: f64) -> String {
    let units = [(86400.0, "d"), (3600.0, "h"), (60.0, "m")];
    match units.iter().find(|(unit, _)| seconds % unit == 0.0) {
        _ if seconds == 0.0 => "never".to_owned(),
        Some((unit, name)) => format!("{}{name}", seconds / unit),
        None => format!("{seconds}s"),
    }
}

/// In the local time zone.
pub(crate) fn time(millis: i64) -> String {
    match jiff::Timestamp::from_millisecond(millis) {
        Ok(at) => at
            .to_zoned(jiff::tz::TimeZone::system())
            .strftime("%Y-%m-%d %H:%M:%S")
            .to_string(),
        Err(_) => millis.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["NAME", ">SIZE"]);
        table.row(["a".into(), "1".into()]);
        table.row(["longer".into(), "12345".into()]);
        assert_eq!(table.render(), "NAME     SIZE\na           1\nlonger  12345\n");
    }

    #[test]
    fn a_time_to_wait_is_told_in_whole_units() {
        for (seconds, text) in [
            (0.0, "never"),
            (0.4, "0.4s"),
            (90.0, "90s"),
            (900.0, "15m"),
            (172_800.0, "2d"),
        ] {
            assert_eq!(wait(seconds), text);
        }
    }

    #[test]
    fn what_a_box_says_cannot_steer_the_terminal() {
        assert_eq!(printable("a\tb\nc"), "a\tb\nc");
        assert_eq!(
            printable("\x1b]0;x\x07\r\u{9b}1m"),
            "\u{fffd}]0;x\u{fffd}\u{fffd}\u{fffd}1m"
        );
        let mut table = Table::new(["A"]);
        table.row(["\x1b[2J\nB".into()]);
        assert_eq!(table.render(), "A\n\u{fffd}[2J B\n");
    }
}
