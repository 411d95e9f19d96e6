//! What the documents say the command line can do, it can.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::harness::{self, Server, Skip};

harness::tests![every_command_in_the_documents_is_one, every_verb_has_help, the_quickstart_shows_memory_that_survives];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Lines of the blocks that are fenced as `sh`, `console` or the like.
fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut within = false;
    for line in text.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            within = !within && ["sh", "bash", "console", "shell"].contains(&language.trim());
        } else if within {
            found.push(line.trim_start_matches("$ ").trim_start_matches("# ").trim().to_owned());
        }
    }
    found
}

/// The words of one call of `dorm`, without what the shell would do with the rest of the line.
fn call(line: &str) -> Option<Vec<String>> {
    let line = line.strip_prefix("sudo ").unwrap_or(line);
    let rest = line.strip_prefix("dorm ")?;
    let mut words = Vec::new();
    let (mut word, mut quote, mut begun) = (String::new(), None, false);
    for c in rest.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), c) => word.push(c),
            (None, '\'' | '"') => (quote, begun) = (Some(c), true),
            (None, '|' | '>' | '#' | ';' | '&') if !begun => break,
            (None, c) if c.is_whitespace() => {
                if begun {
                    words.push(std::mem::take(&mut word));
                }
                begun = false;
            }
            (None, c) => {
                word.push(c);
                begun = true;
            }
        }
    }
    if begun {
        words.push(word);
    }
    Some(words)
}

fn every_command_in_the_documents_is_one() -> Result<()> {
    let mut files = vec![root().join("README.md")];
    if let Ok(docs) = fs::read_dir(root().join("docs")) {
        files.extend(docs.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "md")));
    }
    files.retain(|file| file.exists());
    if !files.iter().any(|f| f.ends_with("README.md")) {
        return Err(Skip("there is no README.md yet".to_owned()).into());
    }
    // Nobody answers at this address: a command that parses fails with 6, one that does not with 2.
    let server = Server::shared()?;
    let mut tried = 0;
    for file in files {
        let text = fs::read_to_string(&file)?;
        for line in commands(&text) {
            let Some(words) = call(&line) else { continue };
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            if ["serve", "bench"].contains(&words.first().copied().unwrap_or_default()) {
                ensure!(server.dorm(&[&words[..1], &["--help"]].concat())?.code == 0, "{line}");
                continue;
            }
            let output = server.dorm(&[&["--url", "http://127.0.0.1:9"], &words[..]].concat())?;
            let usage = output.code == 2 && output.stderr.contains("Usage:");
            ensure!(!usage, "{}: `{line}`: {}", file.display(), output.stderr);
            tried += 1;
        }
    }
    ensure!(tried > 0, "the documents show no command");
    Ok(())
}

fn every_verb_has_help() -> Result<()> {
    let server = Server::shared()?;
    let help = server.dorm(&["--help"])?.text()?;
    let verbs = help.lines().skip_while(|l| *l != "Commands:").skip(1).take_while(|l| !l.is_empty());
    let verbs: Vec<&str> = verbs.filter_map(|l| l.split_whitespace().next()).collect();
    for verb in ["serve", "doctor", "new", "ls", "show", "exec", "shell", "ps", "cp", "start", "stop", "rm", "logs", "stats", "template", "key", "bench"] {
        ensure!(verbs.contains(&verb), "{verb} is missing in {verbs:?}");
    }
    for verb in verbs.iter().filter(|v| **v != "help") {
        let text = server.dorm(&["help", verb])?.text().with_context(|| format!("help of {verb}"))?;
        ensure!(text.contains("Usage: "), "{text}");
    }
    Ok(())
}

/// Far beyond what the whole demonstration takes.
const LONGEST: Duration = Duration::from_secs(600);

/// How long a step took, as the line with this label says.
fn took(shown: &str, step: &str) -> Option<u64> {
    let told = shown.lines().find_map(|line| line.trim_start().strip_prefix(step)?.strip_suffix(" ms"));
    told?.trim_start().parse().ok()
}

/// On a server that has the template, with an agent that has the package already: nothing is fetched.
fn the_quickstart_shows_memory_that_survives() -> Result<()> {
    if let Some(why) = harness::engines::missing_for("criu")? {
        return Err(Skip(why).into());
    }
    let server = Server::start()?;
    server.dorm(&["new", "demo"])?.succeeded()?;
    let jq = "printf '#!/bin/sh\\necho jq-of-the-test\\n' > /usr/local/bin/jq && chmod +x /usr/local/bin/jq";
    server.dorm(&["exec", "demo", "-u", "root", "--", "sh", "-c", jq])?.succeeded()?;
    let mut quickstart = Command::new(root().join("scripts/quickstart"));
    quickstart.arg("--data").arg(&server.data).env("DORM_BIN", harness::binary());
    // It puts another daemon in the place of the first, once that has been waited for.
    let (shown, ended) = std::thread::scope(|scope| {
        let shown = scope.spawn(|| harness::run_within(LONGEST, quickstart, b""));
        let ended = server.wait_for_end_within(LONGEST);
        (shown.join().expect("a command does not panic"), ended)
    });
    if let Ok(Some(pid)) = daemon(&server) {
        kill_process(pid, Signal::TERM)?;
        harness::eventually("its daemon ends", || Ok(test_kill_process(pid).is_err().then_some(())))?;
    }
    server.launch(&[])?;
    let shown = shown?.text()?;
    ended?;
    for step in ["put to disk", "restart the daemon", "wake, and ask the process", "fork it, running", "ask the copy"] {
        ensure!(took(&shown, step).is_some(), "nobody says how long `{step}` took:\n{shown}");
    }
    ensure!(shown.contains("jq-of-the-test"), "the package is missing:\n{shown}");
    let value = shown.lines().find_map(|line| line.split_once("in its memory alone: "));
    let (_, value) = value.with_context(|| format!("no process holds a value:\n{shown}"))?;
    let answers = shown.lines().filter(|line| *line == value).count();
    ensure!(answers == 2, "{answers} of two processes say {value}:\n{shown}");
    server.dorm(&["rm", "--yes", "demo"])?.succeeded().map(drop)
}

fn daemon(server: &Server) -> Result<Option<Pid>> {
    let told: Value = serde_json::from_slice(&fs::read(server.data.join("daemon.json"))?)?;
    let pid = told["pid"].as_i64().context("a pid")?;
    Ok(Pid::from_raw(i32::try_from(pid)?))
}
