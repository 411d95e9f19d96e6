"""A build whose daemon is killed. `begin` prints the build; `after` is told it again."""

import sys

from e2b import Sandbox, Template
from e2b.template.types import BuildInfo

from support import until

if sys.argv[1] == "begin":
    done = Template.build(Template().from_base_image().run_cmd("echo done >/tmp/done"), "finished")
    slow = Template().from_base_image().run_cmd("echo it begins; until test -e /nowhere; do sleep 0.1; done")
    build = Template.build_in_background(slow, "slow", tags=["v1"])
    until("it begins", lambda: any("it begins" == one.message for one in Template.get_build_status(build).log_entries))
    print(done.build_id, build.build_id)
else:
    done, slow = sys.argv[2].split()

    def info(name, build):
        return BuildInfo(template_id=name, build_id=build, alias=name, name=name, tags=[])

    assert Template.get_build_status(info("finished", done)).status.value == "ready"
    status = Template.get_build_status(info("slow", slow))
    assert status.status.value == "error" and "the daemon ended" in status.reason.message, status
    assert not Template.exists("slow:v1") and Template.exists("finished")
    Template.build(Template().from_template("finished").run_cmd("echo built >/tmp/built"), "slow:v1")
    box = Sandbox.create("slow:v1")
    assert box.commands.run("cat /tmp/done /tmp/built").stdout == "done\nbuilt\n"
    box.kill()
