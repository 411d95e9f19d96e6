//! Templates by recipe and by import.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::harness::{self, Output, Server, TarFile, rootfs, tar};

harness::tests![
    a_template_is_built_by_a_recipe_and_used,
    a_recipe_that_has_not_changed_is_not_built_again,
    a_changed_recipe_replaces_the_template_and_agents_keep_their_files,
    a_command_that_fails_ends_the_build_and_leaves_nothing,
    a_build_that_is_interrupted_leaves_nothing,
    the_start_command_of_a_template_runs_in_every_box,
    a_start_command_keeps_an_agent_awake_only_if_the_recipe_says_so,
    what_is_no_recipe_is_refused,
    an_unknown_source_is_refused,
    a_root_filesystem_is_imported_from_a_tar,
    a_folder_is_imported,
    an_oci_layout_is_imported_with_its_whiteouts,
    an_archive_of_docker_save_is_imported,
    a_hostile_archive_stays_inside_its_template,
    what_is_no_archive_is_refused_and_leaves_nothing,
    a_template_is_listed_and_deleted_while_its_agents_stay,
    bad_names_of_templates_are_refused,
];

fn build(server: &Server, name: &str, recipe: &str) -> Result<Output> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("recipe.toml");
    fs::write(&file, recipe)?;
    server.dorm(&["template", "build", name, "-f", &file.display().to_string()])
}

fn import(server: &Server, name: &str, archive: &[u8]) -> Result<Output> {
    server.dorm_with_input(&["template", "import", name, "-"], archive)
}

/// Deletes a template at the end of a test, so that the shared server ends as it began.
struct Gone<'a>(&'a Server, &'a str);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        // The template may be what the test deleted, or never have come about.
        let _ = self.0.dorm(&["template", "rm", "--yes", self.1]);
    }
}

/// No home but those of agents, no template but those listed. For a server of the test's own.
fn nothing_is_left(server: &Server, name: &str) -> Result<()> {
    harness::eventually("the pool holds what is listed", || {
        let ids = |list: serde_json::Value| -> std::collections::BTreeSet<String> {
            list.as_array().into_iter().flatten().filter_map(|e| e["id"].as_str().map(str::to_owned)).collect()
        };
        let templates = server.json(&["template", "ls"])?;
        let listed = templates.as_array().into_iter().flatten().any(|t| t["name"] == name);
        ensure!(!listed, "{name} is listed: {templates}");
        let homes = server.remains.homes();
        let agree = homes == ids(server.json(&["ls"])?) && server.remains.templates() == ids(templates);
        Ok((agree && server.remains.boxes().is_subset(&homes)).then_some(()))
    })
}

fn a_template_is_built_by_a_recipe_and_used() -> Result<()> {
    let server = Server::shared()?;
    let _gone = Gone(&server, "tools");
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("motd"), "from a file\n")?;
    let recipe = r##"
from = "base"
run = ["echo built > /built && id -un > /who", "chmod 700 /srv && chown dev /srv"]
env = { FLAVOUR = "vanilla" }
user = "dev"
workdir = "/srv"

[[files]]
path = "/srv/motd"
source = "motd"
mode = "0640"
owner = "dev"

[[files]]
path = "/usr/local/bin/hi"
content = "#!/bin/sh\necho hi\n"
mode = "0755"
"##;
    fs::write(folder.path().join("recipe.toml"), recipe)?;
    let file = folder.path().join("recipe.toml").display().to_string();
    let built = server.dorm(&["template", "build", "tools", "-f", &file])?;
    built.succeeded()?;
    ensure!(built.stdout().contains("tools"), "{built}");
    let agent = server.agent_with("of-tools", &["--template", "tools"])?;
    let seen = agent.sh_text("cat /built /who; hi; id -un; pwd; echo $FLAVOUR; cat motd; stat -c '%a %U' motd")?;
    ensure!(seen == "built\nroot\nhi\ndev\n/srv\nvanilla\nfrom a file\n640 dev", "{seen}");
    let log = server.dorm(&["template", "log", "tools"])?.text()?;
    ensure!(log.contains("chmod 700"), "{log}");
    Ok(())
}

fn a_recipe_that_has_not_changed_is_not_built_again() -> Result<()> {
    let server = Server::shared()?;
    let _gone = Gone(&server, "cached");
    let recipe = "from = \"base\"\nrun = [\"date +%N%s > /when\"]\n";
    build(&server, "cached", recipe)?.succeeded()?;
    let first = server.json(&["template", "ls"])?;
    let again = build(&server, "cached", recipe)?;
    ensure!(again.succeeded()?.stdout().contains("already"), "{again}");
    ensure!(server.json(&["template", "ls"])?.to_string().contains(&id_of(&first, "cached")?));
    Ok(())
}

fn id_of(templates: &serde_json::Value, name: &str) -> Result<String> {
    let found = templates.as_array().into_iter().flatten().find(|t| t["name"] == name);
    Ok(found.and_then(|t| t["id"].as_str()).with_context(|| format!("{name} in {templates}"))?.to_owned())
}

fn a_changed_recipe_replaces_the_template_and_agents_keep_their_files() -> Result<()> {
    let server = Server::shared()?;
    let _gone = Gone(&server, "changing");
    build(&server, "changing", "from = \"base\"\nrun = [\"echo one > /version\"]\n")?.succeeded()?;
    let old = server.agent_with("of-old", &["-T", "changing"])?;
    build(&server, "changing", "from = \"base\"\nrun = [\"echo two > /version\"]\n")?.succeeded()?;
    let new = server.agent_with("of-new", &["-T", "changing"])?;
    old.stop()?;
    ensure!(old.sh_text("cat /version")? == "one" && new.sh_text("cat /version")? == "two");
    Ok(())
}

fn a_command_that_fails_ends_the_build_and_leaves_nothing() -> Result<()> {
    let server = Server::start()?;
    let recipe = "from = \"base\"\nrun = [\"echo first step\", \"echo a-word-of-the-log; exit 7\", \"echo never\"]\n";
    let output = build(&server, "failing", recipe)?;
    ensure!(output.code == 1, "{output}");
    ensure!(output.stderr.contains("a-word-of-the-log") && output.stderr.contains('7'), "{output}");
    ensure!(!output.stderr.contains("never\n"), "{output}");
    nothing_is_left(&server, "failing")?;
    server.dorm(&["new", "of-failing", "-T", "failing"])?.refused(3, &["failing"])
}

fn a_build_that_is_interrupted_leaves_nothing() -> Result<()> {
    let server = Server::start()?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("recipe.toml");
    fs::write(&file, "from = \"base\"\nrun = [\"echo now-it-runs; sleep 7171\"]\n")?;
    let mut child = server
        .command(&["template", "build", "interrupted", "-v", "-f", &file.display().to_string()])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()?;
    let stderr = std::io::BufReader::new(child.stderr.take().context("piped")?);
    let runs = std::io::BufRead::lines(stderr).any(|line| line.is_ok_and(|l| l.trim() == "now-it-runs"));
    ensure!(runs, "the build did not get to its command");
    kill_process(Pid::from_raw(child.id() as i32).context("a pid")?, Signal::INT)?;
    ensure!(child.wait()?.code() == Some(130));
    nothing_is_left(&server, "interrupted")
}

fn the_start_command_of_a_template_runs_in_every_box() -> Result<()> {
    let server = Server::shared()?;
    let _gone = Gone(&server, "starting");
    build(&server, "starting", "from = \"base\"\nuser = \"user\"\nstart = \"echo $(id -un) >> /tmp/started; exec sleep 7272\"\n")?
        .succeeded()?;
    let agent = server.agent_with("of-starting", &["-T", "starting"])?;
    for times in 1..=2 {
        harness::eventually("the start command runs", || {
            let seen = agent.sh("cat /tmp/started; pgrep -fc '^sleep 7272'")?.stdout();
            Ok((seen == "user\n".repeat(times) + "1\n").then_some(()))
        })?;
        agent.stop()?;
        agent.start()?;
    }
    Ok(())
}

fn a_start_command_keeps_an_agent_awake_only_if_the_recipe_says_so() -> Result<()> {
    let server = Server::shared()?;
    let (_service, _work) = (Gone(&server, "service"), Gone(&server, "work"));
    build(&server, "service", "from = \"base\"\nstart = \"exec sleep 7373\"\n")?.succeeded()?;
    build(&server, "work", "from = \"service\"\nstart_keeps_awake = true\n")?.succeeded()?;
    let work = server.agent_with("at-work", &["-T", "work", "--standby-after", "0.4"])?;
    // Made after it, and asleep before it.
    server.agent_with("serving", &["-T", "service", "--standby-after", "0.4"])?.becomes("standby")?;
    harness::eventually("the start command is named", || {
        Ok(server.dorm(&["why", &work.name])?.text()?.contains("in progress").then_some(()))
    })?;
    ensure!(work.state()? == "running", "{}", work.show()?);
    Ok(())
}

fn what_is_no_recipe_is_refused() -> Result<()> {
    let server = Server::start()?;
    for (recipe, word) in [
        ("from = \"base\"\npackages = [\"jq\"]\n", "packages"),
        ("run = []\n", "from"),
        ("from = ", "line 1"),
        ("from = \"base\"\n[[files]]\npath = \"relative\"\ncontent = \"x\"\n", "relative"),
        ("from = \"base\"\n[[files]]\npath = \"/x\"\ncontent = \"x\"\nmode = \"rwx\"\n", "mode"),
        ("from = \"base\"\napt = [\"--purge\"]\n", "--purge"),
        ("from = \"base\"\n[env]\n\"A=B\" = \"x\"\n", "A=B"),
    ] {
        let output = build(&server, "no-recipe", recipe)?;
        ensure!(matches!(output.code, 1 | 2) && output.stderr.contains(word), "{recipe}: {output}");
    }
    server.dorm(&["template", "build", "no-recipe", "-f", "/no/such/recipe.toml"])?.refused(3, &["/no/such/recipe.toml"])?;
    nothing_is_left(&server, "no-recipe")
}

fn an_unknown_source_is_refused() -> Result<()> {
    let server = Server::start()?;
    build(&server, "orphan", "from = \"nowhere\"\n")?.refused(3, &["nowhere"])?;
    let output = build(&server, "orphan", "from = \"redhat:9\"\n")?;
    ensure!(output.code != 0, "{output}");
    nothing_is_left(&server, "orphan")
}

fn a_root_filesystem_is_imported_from_a_tar() -> Result<()> {
    let server = Server::shared()?;
    let _gone = Gone(&server, "plain-tar");
    let mut files = rootfs()?;
    files.push(TarFile::file("etc/imported", "yes"));
    files.push(TarFile::hard_link("etc/second", "etc/imported"));
    files.push(TarFile::symlink("etc/link", "imported"));
    import(&server, "plain-tar", &tar(&files)?)?.succeeded()?;
    let agent = server.agent_with("of-tar", &["-T", "plain-tar"])?;
    ensure!(agent.sh_text("cat /etc/imported /etc/second /etc/link; stat -c %h /etc/imported")? == "yesyesyes2");
    Ok(())
}

fn a_folder_is_imported() -> Result<()> {
    let server = Server::shared()?;
    let _gone = Gone(&server, "folder");
    let folder = tempfile::tempdir()?;
    let mut archive = ::tar::Archive::new(std::io::Cursor::new(tar(&rootfs()?)?));
    archive.unpack(folder.path())?;
    fs::write(folder.path().join("etc/imported"), "from a folder")?;
    server.dorm(&["template", "import", "folder", &folder.path().display().to_string()])?.succeeded()?;
    let agent = server.agent_with("of-folder", &["-T", "folder"])?;
    ensure!(agent.sh_text("cat /etc/imported")? == "from a folder");
    Ok(())
}

/// Layers: the second adds, the third deletes a file and makes a folder opaque.
fn layers() -> Result<Vec<Vec<u8>>> {
    let mut first = rootfs()?;
    first.extend([
        TarFile::folder("data"),
        TarFile::file("data/kept", "kept"),
        TarFile::file("data/deleted", "old"),
        TarFile::folder("opaque"),
        TarFile::file("opaque/old", "old"),
        TarFile::folder("opaque/deep"),
        TarFile::file("opaque/deep/old", "old"),
    ]);
    let second = [TarFile::file("data/added", "added"), TarFile::file("data/kept", "changed")];
    let third =
        [TarFile::file("data/.wh.deleted", ""), TarFile::file("opaque/.wh..wh..opq", ""), TarFile::file("opaque/new", "new")];
    [&first[..], &second, &third].into_iter().map(tar).collect()
}

const LOOK: &str = "cd /data; ls; cat kept added; cd /opaque; ls -A; cat new; echo; echo $MADE_BY; pwd";

fn imported_layers_are_right(server: &std::sync::Arc<Server>, template: &str) -> Result<()> {
    let agent = server.agent_with("of-layers", &["-T", template])?;
    let seen = agent.sh_text(LOOK)?;
    ensure!(seen == "added\nkept\nchangedaddednew\nnew\ntests\n/opaque", "{seen}");
    Ok(())
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn an_oci_layout_is_imported_with_its_whiteouts() -> Result<()> {
    let server = Server::start()?;
    let folder = tempfile::tempdir()?;
    let blobs = folder.path().join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    let put = |bytes: &[u8], kind: &str| -> Result<serde_json::Value> {
        fs::write(blobs.join(digest(bytes)), bytes)?;
        Ok(json!({"mediaType": kind, "digest": format!("sha256:{}", digest(bytes)), "size": bytes.len()}))
    };
    let layers = layers()?;
    let entries = layers
        .iter()
        .map(|layer| put(layer, "application/vnd.oci.image.layer.v1.tar"))
        .collect::<Result<Vec<_>>>()?;
    let ids: Vec<String> = layers.iter().map(|layer| format!("sha256:{}", digest(layer))).collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {"Env": ["MADE_BY=tests", "PATH=/bin"], "WorkingDir": "/data"},
        "rootfs": {"type": "layers", "diff_ids": ids},
    });
    let config = put(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json")?;
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": entries,
    });
    let manifest = put(manifest.to_string().as_bytes(), "application/vnd.oci.image.manifest.v1+json")?;
    fs::write(folder.path().join("oci-layout"), json!({"imageLayoutVersion": "1.0.0"}).to_string())?;
    fs::write(folder.path().join("index.json"), json!({"schemaVersion": 2, "manifests": [manifest]}).to_string())?;

    server.dorm(&["template", "import", "oci", &folder.path().display().to_string()])?.succeeded()?;
    imported_layers_are_right(&server, "oci")?;
    // One changed byte, and the layer is not what the manifest names.
    corrupt(&blobs.join(digest(&layers[1])))?;
    let refused = server.dorm(&["template", "import", "oci-broken", &folder.path().display().to_string()])?;
    ensure!(refused.code != 0 && refused.stderr.contains("sha256"), "{refused}");
    nothing_is_left(&server, "oci-broken")
}

fn corrupt(file: &Path) -> Result<()> {
    let mut bytes = fs::read(file)?;
    // Within a file's content, behind its header.
    bytes[512] ^= 1;
    Ok(fs::write(file, bytes)?)
}

fn an_archive_of_docker_save_is_imported() -> Result<()> {
    let server = Server::shared()?;
    let _gone = Gone(&server, "docker");
    let layers = layers()?;
    let ids: Vec<String> = layers.iter().map(|layer| format!("sha256:{}", digest(layer))).collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {"Env": ["MADE_BY=tests", "PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": ids},
    });
    let names: Vec<String> = (0..layers.len()).map(|i| format!("{}/layer.tar", digest(&layers[i]))).collect();
    let config_name = format!("{}.json", digest(config.to_string().as_bytes()));
    let manifest = json!([{"Config": config_name, "RepoTags": ["tests:latest"], "Layers": names}]);
    let mut files = vec![
        TarFile::file(&config_name, config.to_string()),
        TarFile::file("manifest.json", manifest.to_string()),
    ];
    files.extend(names.iter().zip(&layers).map(|(name, layer)| TarFile::file(name, layer.as_slice())));
    import(&server, "docker", &tar(&files)?)?.succeeded()?;
    imported_layers_are_right(&server, "docker")
}

fn a_hostile_archive_stays_inside_its_template() -> Result<()> {
    let server = Server::shared()?;
    let canary = tempfile::tempdir()?;
    fs::write(canary.path().join("victim"), "unharmed")?;
    let outside = canary.path().display().to_string();
    let climbing = format!("../../../../../../..{outside}/planted");
    for (number, hostile) in [
        vec![TarFile::file(&climbing, "x")],
        vec![TarFile::file(&format!("{outside}/planted"), "x")],
        vec![TarFile::symlink("way", &outside), TarFile::file("way/planted", "x"), TarFile::file("way/victim", "x")],
        vec![TarFile::symlink("etc", &outside), TarFile::file("etc/planted", "x")],
        vec![TarFile::hard_link("link", &format!("{outside}/victim")), TarFile::file("link", "x")],
        vec![TarFile::symlink("way", ".."), TarFile::file(&format!("way/way/..{outside}/planted"), "x")],
        vec![TarFile::block_device("disk")],
        vec![TarFile::file(".wh...", ""), TarFile::file("etc/.wh...", "")],
        vec![TarFile::file("proc/sys/kernel/planted", "x"), TarFile::symlink("dev", "/"), TarFile::symlink("run", &outside)],
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("hostile-{number}");
        let _gone = Gone(&server, &name);
        let files = [rootfs()?, hostile].concat();
        let output = import(&server, &name, &tar(&files)?)?;
        let seen: Vec<_> = fs::read_dir(canary.path())?.flatten().map(|e| e.file_name()).collect();
        ensure!(seen == ["victim"], "archive {number} made {seen:?}");
        ensure!(fs::read_to_string(canary.path().join("victim"))? == "unharmed", "archive {number} overwrote a file");
        if output.code == 0 {
            // It may be of no use as a template, but a box of it harms nobody.
            let made = server.dorm(&["new", &name, "-T", &name])?;
            let agent = if made.code == 0 || server.names()?.contains(&name) { Some(server.adopt(&name)?) } else { None };
            ensure!(fs::read_dir(canary.path())?.count() == 1, "a box of archive {number} reached the host");
            drop(agent);
        }
    }
    Ok(())
}

fn what_is_no_archive_is_refused_and_leaves_nothing() -> Result<()> {
    let server = Server::start()?;
    let whole = tar(&rootfs()?)?;
    for bytes in [&b""[..], b"not an archive at all", &[0x1f, 0x8b, 8, 0, 1, 2, 3], &whole[..whole.len() / 2]] {
        let output = import(&server, "broken", bytes)?;
        ensure!(output.code == 1 && !output.stderr.is_empty(), "{} bytes: {output}", bytes.len());
    }
    server.dorm(&["template", "import", "broken", "/no/such/file.tar"])?.refused(3, &["/no/such/file.tar"])?;
    nothing_is_left(&server, "broken")
}

fn a_template_is_listed_and_deleted_while_its_agents_stay() -> Result<()> {
    let server = Server::start()?;
    build(&server, "short-lived", "from = \"base\"\nrun = [\"echo here > /mark\"]\n")?.succeeded()?;
    let agent = server.agent_with("of-short-lived", &["-T", "short-lived"])?;
    let listed = server.json(&["template", "ls"])?;
    let entry = listed.as_array().into_iter().flatten().find(|t| t["name"] == "short-lived").context("listed")?;
    ensure!(entry["agents"] == 1 && entry["recipe_hash"].is_string(), "{entry}");
    server.dorm(&["template", "rm", "short-lived"])?.refused(2, &["--yes"])?;
    server.dorm(&["template", "rm", "--yes", "short-lived"])?.succeeded()?;
    nothing_is_left(&server, "short-lived")?;
    agent.stop()?;
    ensure!(agent.sh_text("cat /mark")? == "here");
    server.dorm(&["template", "rm", "--yes", "short-lived"])?.refused(3, &["short-lived"])
}

fn bad_names_of_templates_are_refused() -> Result<()> {
    let server = Server::start()?;
    for name in ["Upper", "a/b", "..", "a b", "ünï"] {
        let output = build(&server, name, "from = \"base\"\n")?;
        ensure!(matches!(output.code, 1 | 2), "{name}: {output}");
        let output = import(&server, name, &tar(&rootfs()?)?)?;
        ensure!(matches!(output.code, 1..=3), "{name}: {output}");
        nothing_is_left(&server, name)?;
    }
    Ok(())
}
