"""Templates of the Python SDK: what their builder can ask for, and what becomes of it."""

import json
import pathlib
import tempfile

from e2b import (
    BuildException,
    InvalidArgumentException,
    Sandbox,
    SandboxException,
    Template,
    TemplateException,
    default_build_logger,
    wait_for_file,
    wait_for_port,
    wait_for_process,
    wait_for_timeout,
    wait_for_url,
)

from support import SUDO, fails, until

context = pathlib.Path(tempfile.mkdtemp())
(context / "app").mkdir()
(context / "app/main.py").write_text("print('main')\n")
(context / "app/sub").mkdir()
(context / "app/sub/data.txt").write_text("data\n")
(context / "app/skipped.log").write_text("not wanted\n")
(context / "app/link").symlink_to("main.py")
(context / "one file.txt").write_text("one\n")
(context / "two.txt").write_text("two\n")
(context / ".dockerignore").write_text("*.log\n**/*.log\n")


def template(**options):
    return Template(file_context_path=str(context), **options)


def run(box, command, **options):
    return box.commands.run(command, **options).stdout.strip()


# Instructions, each where those before it lead.
tools = "apt-get pip npm bun mcp-gateway devcontainer"
shim = f"""for tool in {tools}; do printf '#!/bin/sh\\necho "$(basename $0) $*" >>/var/calls\\n' >/usr/local/bin/$tool; done
chmod 755 /usr/local/bin/*; touch /var/calls; chmod 666 /var/calls"""
logs = []
built = Template.build(
    template()
    .from_base_image()
    .run_cmd(shim, user="root")
    .run_cmd(["id -un >/tmp/who", "pwd >/tmp/where"])
    .copy("app", "/srv/app", user="root", mode=0o640)
    .copy(["one file.txt", "two.txt"], "files/", force_upload=True)
    .copy_items([{"src": "app/link", "dest": "resolved", "resolveSymlinks": True}, {"src": "*.txt", "dest": "all"}])
    .copy("app/link", "kept", gzip=False)
    .make_dir(["made/a", "made/b"], mode=0o700)
    .rename("made/a", "made/c")
    .make_symlink("two.txt", "files/symlink")
    .remove("made/b", recursive=True, force=True)
    .set_envs({"FLAVOUR": "vanilla", "SPACED": "a b"})
    .run_cmd('echo "$FLAVOUR $SPACED" >/tmp/flavour')
    .set_workdir("work")
    .run_cmd("pwd >/tmp/where-now")
    .set_user("dev")
    .run_cmd("id -un >/tmp/made-by")
    .pip_install(["numpy", "pandas"])
    .pip_install("flask", g=False)
    .npm_install("typescript", g=True)
    .npm_install(dev=True)
    .bun_install("tsx")
    .apt_install(["vim"], no_install_recommends=True)
    .run_cmd("git init -q --bare /tmp/origin.git")
    .git_clone("/tmp/origin.git", "/tmp/cloned", depth=1)
    .skip_cache()
    .run_cmd("for n in $(seq 250); do echo line $n; done"),
    "tools",
    cpu_count=1,
    memory_mb=300,
    min_free_disk_mb=0,
    on_build_logs=lambda entry: (logs.append(entry.message), default_build_logger()(entry)),
)
assert (built.name, built.template_id, built.tags) == ("tools", "tools", ["default"]), built
lines = [message for message in logs if message.startswith("line ")]
assert lines == [f"line {n}" for n in range(1, 251)], lines
box = Sandbox.create("tools")
info = box.get_info()
assert (info.template_id, info.cpu_count, info.memory_mb) == ("tools", 1, 300), info
assert run(box, "cat /tmp/who /tmp/where /tmp/flavour /tmp/where-now") == "user\n/home/user\nvanilla a b\n/home/user/work"
assert run(box, "id -un; pwd; cat /tmp/made-by") == "dev\n/home/user/work\ndev"
if SUDO:
    assert run(box, "sudo id -un") == "root"
assert run(box, "cd /srv/app && stat -c '%n %U %a' . main.py sub sub/data.txt", user="root") == (
    ". root 750\nmain.py root 640\nsub root 750\nsub/data.txt root 640"
)
assert run(box, "ls /srv/app", user="root").split() == ["link", "main.py", "sub"]
assert run(box, "cd /home/user/files && stat -c '%n %U' * && cat *.txt") == "one file.txt user\nsymlink user\ntwo.txt user\none\ntwo"
assert run(box, "cd /home/user && readlink kept; test ! -L resolved && cat resolved; ls all made") == (
    "main.py\nprint('main')\nall:\none file.txt\ntwo.txt\n\nmade:\nc"
)
assert run(box, "stat -c %a /home/user/made/c", user="root") == "700"
assert run(box, "test -d /tmp/cloned/.git; cat /var/calls") == (
    "pip install numpy pandas\npip install --user flask\nnpm install -g typescript\nnpm install --save-dev\n"
    "bun install tsx\napt-get update\napt-get install -y --no-install-recommends vim"
)
box.kill()

# What does not change is not built again; a build by another name is.
again = template().from_template("tools").run_cmd("cat /proc/sys/kernel/random/uuid >/tmp/built")
first = Template.build(again, "again:v1", tags=["stable"])
stamp = run(Sandbox.create("again:v1"), "cat /tmp/built")
second = Template.build(again, "again:v1", tags=["stable"])
assert second.build_id != first.build_id
assert run(Sandbox.create("again:stable"), "cat /tmp/built") == stamp
assert {one.tag: one.build_id for one in Template.get_tags("again")} == {"v1": second.build_id, "stable": second.build_id}
Template.build(again, "again:v1", skip_cache=True)
assert run(Sandbox.create("again:v1"), "cat /tmp/built") != stamp

# Names, aliases and tags.
assert Template.exists("again:v1") and Template.alias_exists("tools")
assert not Template.exists("again") and not Template.exists("nothing")
tagged = Template.assign_tags("again:stable", ["default", "prod"])
assert (tagged.build_id, tagged.tags) == (second.build_id, ["default", "prod"])
assert run(Sandbox.create("again"), "cat /tmp/built") == stamp
assert {one.tag for one in Template.get_tags("again")} == {"default", "prod", "stable", "v1"}
Template.remove_tags("again", ["prod", "v1"])
assert {one.tag for one in Template.get_tags("again")} == {"default", "stable"}
with fails(TemplateException, "404"):
    Template.get_tags("nothing")
with fails(SandboxException, "404"):
    Sandbox.create("again:prod")

# The start command runs in every sandbox, which is there once it is ready.
serving = template().from_template("tools").set_user("user").set_workdir("/home/user")
Template.build(serving.set_start_cmd("sleep 0.5; exec python3 -m http.server 8123", wait_for_port(8123)), "port")
assert "Directory listing" in run(Sandbox.create("port"), "curl -s http://localhost:8123/")
commands = [
    wait_for_url("http://localhost:8123/"),
    wait_for_process("python3"),
    wait_for_file("/etc/passwd"),
    wait_for_timeout(1000),
]
for number, ready in enumerate(commands):
    Template.build(template().from_template("port").set_ready_cmd(ready), f"ready-{number}")
    run(Sandbox.create(f"ready-{number}"), "true" if number > 1 else "pgrep -f http.server")

# What goes wrong is told, with the line of the program that asked for it.
with fails(BuildException, "exit code 7", "a word of the log"):
    Template.build(template().from_template("tools").run_cmd("echo a word of the log; exit 7"), "broken")
assert not Template.exists("broken")
with fails(BuildException, "nothing-of-this-name"):
    Template.build(template().from_template("nothing-of-this-name"), "orphan")
with fails(BuildException, "cannot name a template"):
    Template.build(template().from_base_image(), "Not a name")
with fails(BuildException, "memoryMB"):
    Template.build(template().from_base_image(), "small", memory_mb=1)
with fails(Exception, "nothing.txt"):
    Template.build(template().from_base_image().copy("nothing.txt", "/"), "empty-handed")

# In the background.
slow = template().from_template("tools").run_cmd("echo it begins; until test -e /nowhere; do sleep 0.1; done")
background = Template.build_in_background(slow, "slow")
status = until("it begins", lambda: next(
    (one for one in [Template.get_build_status(background)] if any("it begins" == e.message for e in one.log_entries)), None
))
assert status.status.value == "building" and not Template.exists("slow")
offset = len(status.log_entries)
assert Template.get_build_status(background, logs_offset=offset).log_entries == []

# Images that are at hand under their own name: here, built before. This server pulls from no registry.
for name in ["python:3", "mine:1"]:
    Template.build(template().from_template("tools"), name)
dockerfile = "FROM python:3\nENV A=1\nWORKDIR /srv\nCOPY two.txt /srv/\nRUN cat two.txt >read\n"
makers = [
    template().from_image("registry.example.org:5000/team/mine:1", username="me", password="secret"),
    template().from_aws_registry("1.dkr.ecr.eu.amazonaws.com/mine:1", "id", "secret", "eu"),
    template().from_gcp_registry("gcr.io/project/mine:1", {"type": "service_account"}),
    template().from_python_image(),
    template().from_dockerfile(dockerfile),
]
for maker in makers:
    made_by = maker.run_cmd("id -un | sudo tee /made-by") if SUDO else maker.run_cmd("id -un >/made-by", user="root")
    Template.build(made_by, "of-image")
assert run(Sandbox.create("of-image"), "cat /made-by /srv/read; pwd").splitlines()[1:] == ["two", "/srv"]
missing = {
    "ubuntu:24.04": template().from_ubuntu_image("24.04"),
    "node:lts": template().from_node_image(),
    "alpine:3.24": template().from_alpine_image(),
    "fedora:44": template().from_fedora_image(),
    "archlinux:latest": template().from_arch_image(),
    "bun:latest": template().from_bun_image(),
    "debian:12": template().from_debian_image("12"),
}
for image, builder in missing.items():
    with fails(BuildException, f"dorm template import {image} "):
        Template.build(builder, "of-image")
with fails(InvalidArgumentException):
    template().from_image("mine:1", username="me")

# Templates of E2B's with tools of their own.
for name in ["mcp-gateway", "devcontainer"]:
    Template.build(template().from_template("tools").run_cmd(": >/var/calls"), name)
Template.build(template().from_template("mcp-gateway").add_mcp_server(["exa", "brave"]), "with-mcp")
assert run(Sandbox.create("with-mcp"), "cat /var/calls") == "mcp-gateway pull exa brave"
prepare = "printf '#!/bin/sh\\necho $1' >/prepare-exec.sh; chmod 755 /prepare-exec.sh"
prepared = template().from_template("devcontainer").run_cmd(prepare, user="root")
in_container = prepared.beta_dev_container_prebuild("/repo").beta_set_dev_container_start("/repo")
# The SDK starts it with sudo.
if SUDO:
    Template.build(in_container, "in-container")
    assert run(Sandbox.create("in-container"), "cat /devcontainer.sh /var/calls") == (
        "/repo\ndevcontainer build --workspace-folder /repo\ndevcontainer up --workspace-folder /repo"
    )
with fails(BuildException):
    template().from_base_image().add_mcp_server("exa")

# What the SDK says of a template by itself.
described = template(file_ignore_patterns=["two.txt"]).from_image("mine:1").run_cmd("true").copy("app", "/app")
assert json.loads(Template.to_json(described))["fromImage"] == "mine:1"
assert Template.to_dockerfile(described).startswith("FROM mine:1\nRUN true\nCOPY app /app")

page = Sandbox.list()
while page.has_next:
    for one in page.next_items():
        Sandbox.kill(one.sandbox_id)
