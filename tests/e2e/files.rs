//! Files and folders into and out of a box, and what must not get out that way.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::harness::{self, Agent, Server, TarFile};

harness::tests![
    a_file_goes_in_and_comes_out_unchanged,
    an_empty_file_goes_both_ways,
    a_relative_path_is_one_of_the_users_home,
    a_folder_goes_in_and_comes_out_with_modes_and_links,
    an_existing_folder_gets_the_copy_inside_it,
    stdin_becomes_a_file_and_a_file_becomes_stdout,
    a_file_is_written_in_place,
    missing_folders_on_the_way_are_made,
    files_belong_to_whom_the_copy_is_made_as,
    a_file_that_the_user_may_not_read_is_refused,
    missing_paths_are_refused_on_both_sides,
    names_that_are_no_utf8_survive_in_folders,
    a_symlink_in_the_box_leads_to_the_boxs_own_file,
    an_archive_with_climbing_names_does_not_leave_the_folder,
    a_folder_made_by_a_hostile_box_stays_in_its_place_on_the_host,
    a_full_disk_is_told_while_a_file_is_written,
];

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn noise(length: usize) -> Vec<u8> {
    (0..length as u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

fn cp(agent: &Agent, from: &str, to: &str) -> Result<()> {
    agent.server.dorm(&["cp", from, to])?.succeeded().map(drop)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of temporary folders are UTF-8")
}

fn a_file_goes_in_and_comes_out_unchanged() -> Result<()> {
    let agent = Server::shared()?.agent("file")?;
    let folder = tempfile::tempdir()?;
    let (here, back) = (folder.path().join("in"), folder.path().join("out"));
    let bytes = noise(7_000_001);
    fs::write(&here, &bytes)?;
    cp(&agent, text(&here), &agent.at("/home/user/big"))?;
    ensure!(agent.sh_text("sha256sum < big; stat -c '%s %U' big")? == format!("{}  -\n7000001 user", sum(&bytes)));
    cp(&agent, &agent.at("/home/user/big"), text(&back))?;
    ensure!(sum(&fs::read(&back)?) == sum(&bytes), "the file came back as another");
    Ok(())
}

fn an_empty_file_goes_both_ways() -> Result<()> {
    let agent = Server::shared()?.agent("empty")?;
    let folder = tempfile::tempdir()?;
    let (here, back) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&here, "")?;
    cp(&agent, text(&here), &agent.at("/tmp/empty"))?;
    ensure!(agent.sh_text("stat -c %s /tmp/empty")? == "0");
    cp(&agent, &agent.at("/tmp/empty"), text(&back))?;
    ensure!(fs::read(&back)?.is_empty());
    Ok(())
}

fn a_relative_path_is_one_of_the_users_home() -> Result<()> {
    let agent = Server::shared()?.agent("relative")?;
    let folder = tempfile::tempdir()?;
    let here = folder.path().join("notes.txt");
    fs::write(&here, "hello")?;
    cp(&agent, text(&here), &agent.at(""))?;
    ensure!(agent.sh_text("cat /home/user/notes.txt")? == "hello");
    ensure!(agent.server.dorm(&["cp", &agent.at("notes.txt"), "-"])?.text()? == "hello");
    Ok(())
}

fn a_folder_goes_in_and_comes_out_with_modes_and_links() -> Result<()> {
    let agent = Server::shared()?.agent("folder")?;
    let folder = tempfile::tempdir()?;
    let (here, back) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir_all(here.join("sub/deep"))?;
    fs::create_dir(here.join("empty"))?;
    fs::write(here.join("sub/deep/data"), noise(100_000))?;
    fs::write(here.join("tool"), "#!/bin/sh\necho ran\n")?;
    fs::set_permissions(here.join("tool"), PermissionsExt::from_mode(0o750))?;
    fs::set_permissions(here.join("sub"), PermissionsExt::from_mode(0o700))?;
    symlink("sub/deep/data", here.join("link"))?;
    symlink("/nowhere/at/all", here.join("dangling"))?;
    cp(&agent, text(&here), &agent.at("/home/user/copied"))?;
    let listed = agent.sh_text(
        "cd copied && ./tool && stat -c '%a %U' tool sub && readlink link dangling && ls -d empty && sha256sum < link",
    )?;
    let expected = format!(
        "ran\n750 user\n700 user\nsub/deep/data\n/nowhere/at/all\nempty\n{}  -",
        sum(&noise(100_000))
    );
    ensure!(listed == expected, "{listed}");

    cp(&agent, &agent.at("/home/user/copied"), text(&back))?;
    ensure!(fs::read(back.join("sub/deep/data"))? == noise(100_000));
    ensure!(fs::metadata(back.join("tool"))?.permissions().mode() & 0o777 == 0o750);
    ensure!(fs::metadata(back.join("sub"))?.permissions().mode() & 0o777 == 0o700);
    ensure!(fs::read_link(back.join("dangling"))? == Path::new("/nowhere/at/all"));
    ensure!(back.join("empty").is_dir());
    Ok(())
}

fn an_existing_folder_gets_the_copy_inside_it() -> Result<()> {
    let agent = Server::shared()?.agent("inside")?;
    let folder = tempfile::tempdir()?;
    fs::create_dir(folder.path().join("src"))?;
    fs::write(folder.path().join("src/a"), "a")?;
    cp(&agent, text(&folder.path().join("src")), &agent.at("/tmp"))?;
    cp(&agent, text(&folder.path().join("src/a")), &agent.at("/tmp"))?;
    ensure!(agent.sh_text("cat /tmp/src/a /tmp/a")? == "aa");
    let target = folder.path().join("target");
    fs::create_dir(&target)?;
    cp(&agent, &agent.at("/tmp/src"), text(&target))?;
    cp(&agent, &agent.at("/tmp/a"), text(&target))?;
    ensure!(fs::read(target.join("src/a"))? == b"a" && fs::read(target.join("a"))? == b"a");
    Ok(())
}

fn stdin_becomes_a_file_and_a_file_becomes_stdout() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("streamed")?;
    let bytes = noise(3_000_000);
    server.dorm_with_input(&["cp", "-", &agent.at("/tmp/stream")], &bytes)?.succeeded()?;
    let back = server.dorm(&["cp", &agent.at("/tmp/stream"), "-"])?;
    back.succeeded()?;
    ensure!(back.bytes == bytes, "{} bytes came back", back.bytes.len());
    Ok(())
}

fn a_file_is_written_in_place() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("in-place")?;
    agent.sh("printf 'a long first version' > f && chmod 640 f && ln f second && ln -s f third")?.succeeded()?;
    let before = agent.sh_text("stat -c '%i %a %h' f")?;
    server.dorm_with_input(&["cp", "-", &agent.at("f")], b"short")?.succeeded()?;
    ensure!(agent.sh_text("stat -c '%i %a %h' f")? == before, "mode, inode or links changed");
    ensure!(agent.sh_text("cat second")? == "short", "the hard link does not see the new content");
    server.dorm_with_input(&["cp", "-", &agent.at("third")], b"by link")?.succeeded()?;
    ensure!(agent.sh_text("cat f; test -L third && echo ' link'")? == "by link link");
    Ok(())
}

fn missing_folders_on_the_way_are_made() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("on-the-way")?;
    server.dorm_with_input(&["cp", "-", &agent.at("new/deeper/file")], b"x")?.succeeded()?;
    ensure!(agent.sh_text("cat new/deeper/file; stat -c ' %U' new/deeper")? == "x user");
    Ok(())
}

fn files_belong_to_whom_the_copy_is_made_as() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("owner")?;
    server.dorm_with_input(&["cp", "-u", "root", "-", &agent.at("/etc/made")], b"x")?.succeeded()?;
    server.dorm_with_input(&["cp", "-", &agent.at("/tmp/made")], b"x")?.succeeded()?;
    ensure!(agent.sh_text("stat -c %U /etc/made /tmp/made")? == "root\nuser");
    let refused = server.dorm_with_input(&["cp", "-", &agent.at("/etc/other")], b"x")?;
    ensure!(refused.code != 0 && refused.stderr.to_lowercase().contains("permission"), "{refused}");
    Ok(())
}

fn a_file_that_the_user_may_not_read_is_refused() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("unread")?;
    let refused = server.dorm(&["cp", &agent.at("/etc/shadow"), "-"])?;
    ensure!(refused.code != 0 && refused.bytes.is_empty(), "{refused}");
    ensure!(server.dorm(&["cp", "-u", "root", &agent.at("/etc/shadow"), "-"])?.text()?.contains("root:"));
    Ok(())
}

fn missing_paths_are_refused_on_both_sides() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("absent")?;
    let folder = tempfile::tempdir()?;
    let target = folder.path().join("target");
    server.dorm(&["cp", &agent.at("/no/such/file"), text(&target)])?.refused(3, &["/no/such/file"])?;
    ensure!(!target.exists(), "half a file was left");
    server.dorm(&["cp", "/no/such/local", &agent.at("/tmp/x")])?.refused(3, &["/no/such/local"])?;
    server.dorm(&["cp", "/etc/passwd", "/tmp/x"])?.refused(2, &["hint:"])?;
    server.dorm(&["cp", "/etc/passwd", "nobody-there:/tmp/x"])?.refused(3, &["nobody-there"])
}

fn names_that_are_no_utf8_survive_in_folders() -> Result<()> {
    let agent = Server::shared()?.agent("names")?;
    let folder = tempfile::tempdir()?;
    let (here, back) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&here)?;
    let odd = std::ffi::OsStr::from_bytes(b"caf\xe9 \x01\n*");
    fs::write(here.join(odd), "odd")?;
    cp(&agent, text(&here), &agent.at("/tmp/names"))?;
    let seen = agent.exec(&["python3", "-c", "import os; print(os.listdir(b'/tmp/names'))"])?.text()?;
    ensure!(seen == "[b'caf\\xe9 \\x01\\n*']", "{seen}");
    cp(&agent, &agent.at("/tmp/names"), text(&back))?;
    ensure!(fs::read(back.join(odd))? == b"odd");
    Ok(())
}

fn a_symlink_in_the_box_leads_to_the_boxs_own_file() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("leads-in")?;
    let canary = tempfile::NamedTempFile::new()?;
    fs::write(canary.path(), "the host's secret")?;
    fs::set_permissions(canary.path(), PermissionsExt::from_mode(0o666))?;
    let canary = text(canary.path());
    agent.root("echo the-boxs-own >> /etc/passwd && ln -s /etc/passwd /home/user/link")?.succeeded()?;
    agent.root(&format!("ln -s {canary} /home/user/out && ln -s /../../../../../.. /home/user/up"))?.succeeded()?;
    ensure!(server.dorm(&["cp", &agent.at("link"), "-"])?.text()?.contains("the-boxs-own"));
    let paths =
        ["out".to_owned(), format!("up{canary}"), format!("../../../../..{canary}"), format!("/proc/1/root{canary}")];
    for path in &paths {
        let output = server.dorm(&["cp", "-u", "root", &agent.at(path), "-"])?;
        ensure!(output.code != 0 && !output.stdout().contains("secret"), "{output}");
    }
    for path in &paths {
        // A write through it makes a file in the box, or fails; the host's stays as it is.
        server.dorm_with_input(&["cp", "-u", "root", "-", &agent.at(path)], b"overwritten")?;
        ensure!(fs::read_to_string(canary)? == "the host's secret", "{path} reached the host");
    }
    Ok(())
}

fn an_archive_with_climbing_names_does_not_leave_the_folder() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("climbing")?;
    let canary = tempfile::tempdir()?;
    let outside = text(canary.path()).to_owned();
    for (number, archive) in [
        vec![TarFile::file("inside", "x")],
        vec![TarFile::file("../escaped", "x"), TarFile::file("inside", "x")],
        vec![TarFile::file("../../../../../../../../etc/escaped", "x")],
        vec![TarFile::symlink("out", "/etc"), TarFile::file("out/escaped", "x")],
        vec![TarFile::symlink("out", &outside), TarFile::file("out/escaped", "x")],
        vec![TarFile::hard_link("shadow", "/etc/shadow"), TarFile::file("shadow", "x")],
    ]
    .iter()
    .enumerate()
    {
        let body = harness::tar(archive)?;
        let key = server.key()?;
        let path = format!("/v1/agents/{}/guest/dorm/tar?path=/home/user/target/here&username=root", agent.name);
        let headers = [("x-api-key", key.as_str()), ("content-type", "application/x-tar")];
        let reply = server.http_with("POST", &path, &headers, &body)?;
        // A harmless archive is taken; what becomes of the others is told.
        let good = if number == 0 { 200..300 } else { 200..500 };
        ensure!(good.contains(&reply.status), "{}: {}", reply.status, reply.text());
        let found = agent.root_text("find / -xdev -name escaped -not -path '/home/user/target/here/*'; grep -c root: /etc/shadow")?;
        ensure!(found == "1", "outside of the target: {found}");
        ensure!(fs::read_dir(canary.path())?.next().is_none(), "it reached the host");
        agent.root("rm -rf /home/user/target")?.succeeded()?;
    }
    Ok(())
}

fn a_folder_made_by_a_hostile_box_stays_in_its_place_on_the_host() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("hostile")?;
    let folder = tempfile::tempdir()?;
    let victim = folder.path().join("victim");
    fs::create_dir(&victim)?;
    let script = format!(
        "mkdir /tmp/trap && cd /tmp/trap && ln -s {} way && mkfifo pipe && mknod device b 7 0; cp /bin/true suid && chmod 4755 suid",
        text(&victim)
    );
    agent.root(&script)?;
    let target = folder.path().join("trap");
    let copy = || server.dorm(&["cp", "-u", "root", &agent.at("/tmp/trap"), text(folder.path())]);
    copy()?.succeeded()?;
    ensure!(fs::read_dir(&victim)?.next().is_none());
    ensure!(fs::symlink_metadata(target.join("way"))?.is_symlink());
    let mode = fs::metadata(target.join("suid")).context("ordinary files are copied")?.permissions().mode();
    ensure!(mode & 0o7000 == 0, "a file that acts as its owner came out: {mode:o}");
    ensure!(!target.join("device").exists() && !target.join("pipe").exists());
    // The box now changes what the second copy meets: its link must not be followed on the host.
    agent.root("cd /tmp/trap && rm way && mkdir way && echo x > way/planted")?.succeeded()?;
    copy()?;
    ensure!(fs::read_dir(&victim)?.next().is_none(), "a link of the first copy was followed by the second");
    Ok(())
}

fn a_full_disk_is_told_while_a_file_is_written() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent_with_room("full", 64, &[])?;
    let output = server.dorm_with_input(&["cp", "-", &agent.at("/home/user/big")], &noise(100_000_000))?;
    let told = output.stderr.to_lowercase();
    ensure!(output.code != 0 && (told.contains("space") || told.contains("quota")), "{output}");
    ensure!(agent.sh_text("echo alive")? == "alive");
    Ok(())
}
