//! Volumes: files that outlive the agents that mount them.

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Server};

harness::tests![
    a_volume_outlives_its_agent,
    two_agents_share_a_volume_each_with_its_own_users,
    a_volume_is_there_after_stop_hibernation_and_fork,
    a_volume_that_is_mounted_cannot_be_deleted,
    a_volume_that_is_half_made_or_half_deleted_is_gone_after_the_next_start,
    an_agent_cannot_mount_what_is_not_there_or_where_it_must_not,
    a_volume_holds_no_more_than_its_size,
];

/// A volume, deleted at the end of the test.
pub(crate) struct Volume {
    server: std::sync::Arc<Server>,
    name: String,
    id: String,
}

impl Volume {
    pub(crate) fn new(server: &std::sync::Arc<Server>, name: &str) -> Result<Self> {
        let made = server.json(&["volume", "create", name])?;
        let id = made["id"].as_str().context("a volume has an id")?.to_owned();
        Ok(Self { server: server.clone(), name: name.to_owned(), id })
    }

    pub(crate) fn at(&self, path: &str) -> String {
        format!("{}:{path}", self.name)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let _ = self.server.dorm(&["volume", "rm", &self.name]);
    }
}

fn a_volume_outlives_its_agent() -> Result<()> {
    let server = Server::shared()?;
    let volume = Volume::new(&server, "outlives")?;
    let agent = server.agent_with("writer", &["--volume", &volume.at("/data")])?;
    agent.sh("echo kept > /data/file && mkdir /data/own && ln -s /etc/passwd /data/link")?.succeeded()?;
    ensure!(agent.sh_text("stat -c %U /data/file")? == "user");
    drop(agent);
    let agent = server.agent_with("reader", &["--volume", &volume.at("/home/user/again")])?;
    ensure!(agent.sh_text("cat ~/again/file; stat -c %U ~/again/file")? == "kept\nuser");
    Ok(())
}

fn two_agents_share_a_volume_each_with_its_own_users() -> Result<()> {
    let server = Server::shared()?;
    let volume = Volume::new(&server, "shared")?;
    let one = server.agent_with("share-a", &["--volume", &volume.at("/shared")])?;
    let two = server.agent_with("share-b", &["--volume", &volume.at("/shared")])?;
    one.root("echo root > /shared/of-root && chmod 600 /shared/of-root && echo a > /shared/a")?.succeeded()?;
    ensure!(two.root_text("cat /shared/of-root; stat -c %u /shared/of-root")? == "root\n0");
    ensure!(two.sh("cat /shared/of-root")?.code != 0, "an ordinary user read what is root's");
    two.sh("echo b > /shared/b")?.succeeded()?;
    ensure!(one.sh_text("cat /shared/b")? == "b");
    Ok(())
}

fn a_volume_is_there_after_stop_hibernation_and_fork() -> Result<()> {
    let server = Server::shared()?;
    let volume = Volume::new(&server, "stays")?;
    let agent = server.agent_with("stays", &["--volume", &volume.at("/data"), "--volume", &volume.at("/srv/b")])?;
    // It ticks for as long as it is in the folder where the count is.
    agent.sh("echo 1 > /data/count; cd /data; nohup sh -c 'i=0; while true; do i=$((i+1)); test -e count && echo $i > /tmp/ticks.new && mv /tmp/ticks.new /tmp/ticks; sleep 0.05; done' >/dev/null 2>&1 &")?.succeeded()?;
    let ticks = "a=$(cat /tmp/ticks) && sleep 0.3 && test $(cat /tmp/ticks) -gt $a";
    agent.until("it ticks", ticks)?;
    let pid = agent.sh_text("pgrep -f 'while true' | head -1")?;
    server.dorm(&["hibernate", &agent.name])?.succeeded()?;
    ensure!(agent.state()? == "hibernated");
    ensure!(agent.sh_text("cat /data/count /srv/b/count")? == "1\n1");
    ensure!(agent.sh_text("pgrep -f 'while true' | head -1")? == pid, "its memory is lost: {}", agent.show()?["reason"]);
    agent.until("it ticks in the volume", ticks)?;
    agent.sh("echo 2 > /srv/b/count")?.succeeded()?;
    let name = format!("{}-fork", agent.name);
    server.dorm(&["fork", &agent.name, &name])?.succeeded()?;
    let fork = server.adopt(&name)?;
    ensure!(fork.sh_text("cat /data/count")? == "2");
    fork.sh("echo 3 > /data/count")?.succeeded()?;
    ensure!(agent.sh_text("cat /data/count")? == "3", "a fork shares the volume");
    agent.stop()?;
    agent.start()?;
    ensure!(agent.sh_text("cat /data/count")? == "3");
    Ok(())
}

fn a_volume_that_is_mounted_cannot_be_deleted() -> Result<()> {
    let server = Server::shared()?;
    let volume = Volume::new(&server, "in-use")?;
    let agent = server.agent_with("user-of", &["--volume", &volume.at("/data"), "--no-start"])?;
    let refused = server.dorm(&["volume", "rm", "in-use"])?;
    ensure!(refused.code != 0 && refused.stderr.contains(&agent.name), "{}", refused.stderr);
    let twice = server.dorm(&["volume", "create", "in-use"])?;
    ensure!(twice.code != 0 && twice.stderr.contains("already"), "{}", twice.stderr);
    let listed = server.json(&["volume", "ls"])?;
    let listed = listed.as_array().into_iter().flatten().find(|v| v["name"] == "in-use").context("not listed")?.clone();
    ensure!(listed["agents"][0] == agent.name.as_str());
    drop(agent);
    server.dorm(&["volume", "rm", "in-use"])?.succeeded()?;
    ensure!(!server.data.join("pool/volumes").join(&volume.id).exists(), "its files are left");
    Ok(())
}

fn a_volume_that_is_half_made_or_half_deleted_is_gone_after_the_next_start() -> Result<()> {
    let server = Server::start()?;
    let kept = Volume::new(&server, "kept")?;
    server.kill9()?;
    let volumes = server.data.join("pool/volumes");
    let stray = volumes.join("strayvolumewithnorec");
    std::process::Command::new("btrfs").args(["subvolume", "create"]).arg(&stray).output()?;
    ensure!(stray.exists());
    server.launch(&[])?;
    ensure!(!stray.exists() && volumes.join(&kept.id).exists());
    Ok(())
}

fn an_agent_cannot_mount_what_is_not_there_or_where_it_must_not() -> Result<()> {
    let server = Server::shared()?;
    let volume = Volume::new(&server, "picky")?;
    for (mount, reason) in [
        ("nothing:/data".to_owned(), "no volume"),
        (volume.at("/proc/x"), "cannot be mounted"),
        (volume.at("/a/../../b"), "cannot be mounted"),
        (volume.at("/"), "cannot be mounted"),
    ] {
        let refused = server.dorm(&["new", "refused", "--volume", &mount])?;
        ensure!(refused.code != 0 && refused.stderr.contains(reason), "{mount}: {}", refused.stderr);
    }
    ensure!(!server.names()?.iter().any(|name| name == "refused"));
    Ok(())
}

fn a_volume_holds_no_more_than_its_size() -> Result<()> {
    let server = Server::shared()?;
    let made = server.json(&["volume", "create", "sized", "--size", "32M"])?;
    let id = made["id"].as_str().context("a volume has an id")?.to_owned();
    let volume = Volume { server: server.clone(), name: "sized".to_owned(), id };
    ensure!(made["size"] == 32 << 20, "{made}");
    let agent = server.agent_with("filler", &["--volume", &volume.at("/data")])?;
    let filled = agent.sh("head -c 20M /dev/urandom > /data/a && head -c 20M /dev/urandom > /data/b; sync -f /data")?;
    ensure!(filled.stderr.contains("quota") || filled.stderr.contains("space"), "{filled}");
    // What is removed makes room again, and a home is not counted with it.
    agent.sh("rm /data/*; sync -f /data; head -c 40M /dev/urandom > ~/c")?.succeeded()?;
    harness::eventually("there is room again", || {
        Ok((agent.sh("head -c 20M /dev/urandom > /data/a && sync -f /data")?.code == 0).then_some(()))
    })?;
    server.dorm(&["volume", "create", "tiny", "--size", "1K"])?.refused(1, &["size"])
}
