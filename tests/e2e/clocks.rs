//! Time after a wake is as after opening a laptop's lid; identity is that of the box.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Agent, Server};

harness::tests![
    the_wall_clock_is_right_and_none_goes_back_after_a_wake,
    the_boot_id_outlives_a_wake_and_not_a_stop,
    requests_in_any_order_leave_a_legal_state,
];

/// Says, whenever it is asked, what its clocks have counted since its start.
const CLOCKS: &str = r#"
import os, time
wall, monotonic = time.time(), time.monotonic()
while True:
    if not os.path.exists('/tmp/told'):
        with open('/tmp/telling', 'w') as out:
            print(time.time(), time.time() - wall, time.monotonic() - monotonic, file=out)
        os.rename('/tmp/telling', '/tmp/told')
    time.sleep(0.02)
"#;

/// The wall clock, and what both clocks have counted.
fn told(agent: &Agent) -> Result<[f64; 3]> {
    agent.sh("rm -f /tmp/told")?.succeeded()?;
    agent.until("the clocks are told", "test -s /tmp/told")?;
    let text = agent.sh_text("cat /tmp/told")?;
    let numbers = text.split(' ').map(str::parse).collect::<Result<Vec<f64>, _>>()?;
    numbers.try_into().ok().context("three numbers")
}

fn now() -> Result<f64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64())
}

fn the_wall_clock_is_right_and_none_goes_back_after_a_wake() -> Result<()> {
    let agent = Server::shared()?.agent("clocks")?;
    agent.exec_with(&["-d"], &["python3", "-c", CLOCKS])?.succeeded()?;
    let mut before = told(&agent)?;
    for (asleep, on_disk) in [(Agent::pause as fn(&Agent) -> Result<()>, false), (Agent::hibernate, true)] {
        asleep(&agent)?;
        let slept = now()?;
        std::thread::sleep(Duration::from_secs(1));
        let asked = now()?;
        let after = told(&agent)?;
        // Told after the wake was asked for, and before this moment: no matter how long either took.
        ensure!(
            asked <= after[0] && after[0] <= now()?,
            "its wall clock is {} and not {asked}",
            after[0]
        );
        let passed = [after[1] - before[1], after[2] - before[2]];
        ensure!(passed[0] >= 0.0 && passed[1] >= 0.0, "{before:?} became {after:?}");
        // Like a laptop's, the clock that only counts does not count while the memory is on disk. gVisor's does.
        let counts = !on_disk || harness::engines::behind_gvisor();
        ensure!(
            counts || passed[0] - passed[1] >= (asked - slept) * 0.99,
            "in {} s on disk, of {} s by the wall, {} were counted",
            asked - slept,
            passed[0],
            passed[1]
        );
        before = after;
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

/// Four hands at one agent; what they do is decided by a seed.
fn requests_in_any_order_leave_a_legal_state() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("handled")?;
    let name = agent.name.as_str();
    server.dorm(&["snapshot", name, "--label", "start"])?.succeeded()?;
    let hand = |hand: u64| -> Result<()> {
        let mut random = hand.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for step in 0..6 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let fork = format!("{name}-{hand}-{step}");
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
                let fork = server.adopt(&fork)?;
                fork.sh("test -d /home")?.succeeded()?;
            }
            // What one hand wants another may make impossible, but nothing fails of itself.
            let mends = output.code == 0 || output.code == 4 || command[0] == "exec";
            ensure!(mends, "{output}");
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let hands: Vec<_> = (1..=4).map(|number| scope.spawn(move || hand(number))).collect();
        hands.into_iter().try_for_each(|one| one.join().expect("a hand does not panic"))
    })?;
    let state = harness::eventually("it comes to rest", || {
        let state = agent.state()?;
        Ok(["running", "standby", "hibernated", "stopped"].contains(&state.as_str()).then_some(state))
    })?;
    ensure!(agent.sh_text("hostname")? == name, "from {state} it did not come up");
    Ok(())
}
