//! Time after a wake is as after opening a laptop's lid; identity is that of the box.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Agent, Output, Server};

harness::tests![
    clocks_and_timers_are_after_a_wake_as_after_opening_a_lid,
    the_boot_id_outlives_a_wake_and_not_a_stop,
    requests_in_any_order_leave_a_legal_state,
    an_agent_that_is_deleted_amid_other_requests_is_gone_for_all_of_them,
];

/// Says, whenever it is asked, what the time is, what its clocks have counted since its start, and how long a timer has to go that was
/// set for an hour then.
const CLOCKS: &str = r#"
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
class Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ('every', 'every_ns', 'first', 'first_ns')]
timer = libc.timerfd_create(time.CLOCK_MONOTONIC, 0)
assert timer >= 0 and libc.timerfd_settime(timer, 0, ctypes.byref(Spec(0, 0, 3600, 0)), None) == 0
def left():
    spec = Spec()
    assert libc.timerfd_gettime(timer, ctypes.byref(spec)) == 0
    return spec.first + spec.first_ns / 1e9
clocks = [time.CLOCK_REALTIME, time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME]
begun = [time.clock_gettime(clock) for clock in clocks]
while True:
    if not os.path.exists('/tmp/told'):
        with open('/tmp/telling', 'w') as out:
            print(time.time(), *(time.clock_gettime(clock) - then for clock, then in zip(clocks, begun)), left(), file=out)
        os.rename('/tmp/telling', '/tmp/told')
    time.sleep(0.02)
"#;

/// What it says, in seconds.
#[derive(Debug)]
struct Told {
    now: f64,
    wall: f64,
    monotonic: f64,
    boot: f64,
    left: f64,
}

fn told(agent: &Agent) -> Result<Told> {
    agent.sh("rm -f /tmp/told")?.succeeded()?;
    agent.until("the clocks are told", "test -s /tmp/told")?;
    let text = agent.sh_text("cat /tmp/told")?;
    let numbers = text.split(' ').map(str::parse).collect::<Result<Vec<f64>, _>>()?;
    let numbers: [f64; 5] = numbers.try_into().ok().context("five numbers")?;
    let [now, wall, monotonic, boot, left] = numbers;
    Ok(Told { now, wall, monotonic, boot, left })
}

fn now() -> Result<f64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64())
}

fn clocks_and_timers_are_after_a_wake_as_after_opening_a_lid() -> Result<()> {
    let agent = Server::shared()?.agent("clocks")?;
    agent.exec_with(&["-d"], &["python3", "-c", CLOCKS])?.succeeded()?;
    for (asleep, on_disk) in [(Agent::pause as fn(&Agent) -> Result<()>, false), (Agent::hibernate, true)] {
        let begun = now()?;
        let before = told(&agent)?;
        asleep(&agent)?;
        let slept = now()?;
        // Far longer than falling asleep took, and waking takes, however busy this machine is.
        std::thread::sleep(Duration::from_secs_f64((8.0 * (slept - begun)).max(1.0)));
        let asked = now()?;
        let after = told(&agent)?;
        let ended = now()?;
        // Told after the wake was asked for, and before this moment: no matter how long either took.
        ensure!(asked <= after.now && after.now <= ended, "its wall clock is {} and not {asked}", after.now);
        let [wall, monotonic, boot] =
            [after.wall - before.wall, after.monotonic - before.monotonic, after.boot - before.boot];
        ensure!(wall >= 0.0 && monotonic >= 0.0 && boot >= 0.0, "{before:?} became {after:?}");
        // Like a laptop's, the clock that only counts does not count while the memory is on disk. gVisor's does.
        let counts = !on_disk || harness::engines::behind_gvisor();
        let asleep_for = asked - slept;
        ensure!(
            counts || wall - monotonic >= asleep_for * 0.99,
            "in {asleep_for} s on disk, of {wall} s by the wall, {monotonic} were counted"
        );
        // So does the one of the time since boot, and a timer has as long to go as it had; but for the time of falling asleep and waking, in
        // which one may have been saved or set after the other.
        let on_the_way = ended - begun - asleep_for;
        let late = after.monotonic + after.left - before.monotonic - before.left;
        ensure!(late.abs() <= on_the_way, "after {asleep_for} s a timer is {late} s late: {before:?} became {after:?}");
        ensure!(
            (boot - monotonic).abs() <= on_the_way,
            "in {asleep_for} s of sleep, {boot} s since boot were counted, and {monotonic} s by the other clock"
        );
    }
    Ok(())
}

fn the_boot_id_outlives_a_wake_and_not_a_stop() -> Result<()> {
    let agent = Server::shared()?.agent("boot-id")?;
    let boot_id = || agent.sh_text("cat /proc/sys/kernel/random/boot_id");
    let first = boot_id()?;
    agent.pause()?;
    ensure!(boot_id()? == first, "a thaw changed it");
    agent.hibernate()?;
    ensure!(boot_id()? == first, "a wake from disk changed it");
    agent.stop()?;
    ensure!(boot_id()? != first, "it was started from its files, and has the old boot id");
    Ok(())
}

/// Exit codes and words of messages by which something may be refused.
type Refusals = &'static [(i32, &'static str)];

/// To a verb that saves the memory, which cannot be while a process is being started, for instance.
const UNSAVABLE: Refusals = &[(4, "it goes on as it was")];
/// To a command, whose connection ends with the box that it runs in.
const CUT_OFF: Refusals = &[
    (1, "the agent went to sleep before it answered"),
    (1, "the box did not answer"),
    (6, "the connection to the box broke off"),
];
/// To any verb, where the agent is deleted meanwhile.
const DELETED: Refusals =
    &[(4, "it is being deleted"), (3, "there is no agent"), (3, "there is no snapshot")];

/// What one hand asks may be made impossible by another, but nothing fails of itself.
fn done_or_refused(verb: &str, output: &Output, is_deleted: bool) -> Result<()> {
    let known = match (verb, is_deleted) {
        ("exec", false) => CUT_OFF.to_vec(),
        ("exec", true) => [CUT_OFF, DELETED].concat(),
        (_, true) => [UNSAVABLE, DELETED].concat(),
        (_, false) => UNSAVABLE.to_vec(),
    };
    let is_known = known.iter().any(|(code, words)| output.code == *code && output.stderr.contains(words));
    ensure!(output.code == 0 || is_known, "{output}");
    Ok(())
}

/// One of several hands at an agent that has a snapshot `start`, and is perhaps deleted meanwhile. What it does is decided by a seed. Gives the
/// forks that it made.
fn handle(server: &Arc<Server>, name: &str, seed: u64, steps: usize, is_deleted: bool) -> Result<Vec<Agent>> {
    let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut forks = Vec::new();
    for step in 0..steps {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let fork = format!("{name}-{seed}-{step}");
        let command: &[&str] = match random % 6 {
            0 => &["wake", name],
            1 => &["pause", name],
            2 => &["hibernate", name],
            3 => &["rollback", name, "start"],
            4 => &["fork", name, &fork],
            _ => &["exec", name, "--", "true"],
        };
        let output = server.dorm(command)?;
        if command[0] == "fork" && output.code == 0 {
            forks.push(server.adopt(&fork)?);
        }
        done_or_refused(command[0], &output, is_deleted)?;
    }
    Ok(forks)
}

fn requests_in_any_order_leave_a_legal_state() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("handled")?;
    let name = agent.name.as_str();
    server.dorm(&["snapshot", name, "--label", "start"])?.succeeded()?;
    let forks = std::thread::scope(|scope| -> Result<Vec<Agent>> {
        let server = &server;
        let hands: Vec<_> = (1..=4).map(|seed| scope.spawn(move || handle(server, name, seed, 6, false))).collect();
        let mut forks = Vec::new();
        for hand in hands {
            forks.extend(hand.join().expect("a hand does not panic")?);
        }
        Ok(forks)
    })?;
    let state = harness::eventually("it comes to rest", || {
        let state = agent.state()?;
        Ok(["running", "standby", "hibernated", "stopped"].contains(&state.as_str()).then_some(state))
    })?;
    ensure!(agent.sh_text("hostname")? == name, "from {state} it did not come up");
    forks.iter().try_for_each(|fork| fork.sh("test -d /home")?.succeeded().map(drop))
}

fn an_agent_that_is_deleted_amid_other_requests_is_gone_for_all_of_them() -> Result<()> {
    let server = Server::shared()?;
    // Something else is under way in each round when it is deleted.
    for round in 1..=3 {
        let agent = server.agent("doomed")?;
        let name = agent.name.as_str();
        server.dorm(&["snapshot", name, "--label", "start"])?.succeeded()?;
        let forks = std::thread::scope(|scope| -> Result<Vec<Agent>> {
            let server = &server;
            let others = [1, 2, 3].map(|hand| scope.spawn(move || handle(server, name, 10 * round + hand, 6, true)));
            let mut forks = handle(server, name, 10 * round, 2, true)?;
            server.dorm(&["rm", "--yes", name])?.succeeded()?;
            for other in others {
                forks.extend(other.join().expect("a hand does not panic")?);
            }
            Ok(forks)
        })?;
        server.dorm(&["wake", name])?.refused(3, &["there is no agent"])?;
        let left = server.remains.of_agent(&agent.id);
        ensure!(left.is_empty(), "of {name} there is {left:?}");
        // Those forks are there that were acknowledged, and no others.
        let made: BTreeSet<&str> = forks.iter().map(|fork| fork.name.as_str()).collect();
        let (names, of_it) = (server.names()?, format!("{name}-"));
        let there: BTreeSet<&str> = names.iter().map(String::as_str).filter(|one| one.starts_with(&of_it)).collect();
        ensure!(there == made, "there are {there:?} and not {made:?}");
        forks.iter().try_for_each(|fork| fork.sh("test -d /home")?.succeeded().map(drop))?;
    }
    Ok(())
}
