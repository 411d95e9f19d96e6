"""What a sandbox may reach, in E2B's words, and who may reach it. Arguments: two addresses with ports that anybody answers at,
the first of which `a.here.example` stands for."""

import http.client
import sys

from e2b import ALL_TRAFFIC, Sandbox, SandboxException

from support import fails, until

(there, port), (other, other_port) = (argument.split(":") for argument in sys.argv[1:3])
PROBE = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 15)"


def reaches(box, host, port):
    return box.commands.run(f"python3 -c '{PROBE}' {host} {port} 2>/dev/null && echo yes || echo no").stdout == "yes\n"


def reach(box):
    return reaches(box, there, port), reaches(box, other, other_port)


box = Sandbox.create()
assert reach(box) == (True, True)
box.update_network({"deny_out": [other]})
assert reach(box) == (True, False)
assert box.get_info().network["deny_out"] == [other]
box.update_network({"deny_out": lambda context: [context.all_traffic], "allow_out": [other]})
assert reach(box) == (False, True)
box.update_network({"allow_internet_access": False})
assert reach(box) == (False, False) and box.get_info().allow_internet_access is False
# Names, as far as the rest is denied; the policy is kept over a pause.
box.update_network({"deny_out": [ALL_TRAFFIC], "allow_out": ["*.here.example"]})
assert reaches(box, "a.here.example", port) and not reaches(box, other, other_port)
box.pause()
box.connect()
assert reaches(box, "a.here.example", port) and not reaches(box, other, other_port)
# What is left out is cleared.
box.update_network({})
assert reach(box) == (True, True)
box.kill()

assert reach(Sandbox.create(allow_internet_access=False)) == (False, False)
assert reach(Sandbox.create(network={"deny_out": [f"{there}/32"]})) == (False, True)
for unsupported in [{"rules": {"x.example": [{"transform": {"headers": {"A": "b"}}}]}}, {"egress_proxy": {"address": "x:1"}}]:
    with fails(SandboxException, "network"):
        Sandbox.create(network=unsupported)

# A port that is not public needs the token, and a wrong one is as good as none.
box = Sandbox.create(network={"allow_public_traffic": False})
box.commands.run("python3 -m http.server 8000", background=True, timeout=0)
address, token = box.get_host(8000), box.traffic_access_token


def status(headers):
    connection = http.client.HTTPConnection("127.0.0.1", int(address.split(":")[1]))
    connection.request("GET", "/", headers={"Host": address, **headers})
    return connection.getresponse().status


until("the port answers", lambda: status({"e2b-traffic-access-token": token}) == 200)
assert status({}) == 403
assert status({"e2b-traffic-access-token": "wrong"}) == 403
assert status({"e2b-traffic-access-token": token[:-1]}) == 403
public = Sandbox.create()
assert public.traffic_access_token is None
page = Sandbox.list()
while page.has_next:
    for one in page.next_items():
        Sandbox.kill(one.sandbox_id)
