"""A TLS proxy in front of the server, as one puts before it: for SDKs that speak https alone.

Names below `localhost` lead to this machine, and the proxy's certificate is one that the SDK is told to trust.
"""

import os
import socket
import ssl
import subprocess
import tempfile
import threading
import urllib.parse

server = urllib.parse.urlsplit(os.environ["E2B_API_URL"])
folder = tempfile.mkdtemp(prefix="dorm-tls-")
authority, authority_key = os.path.join(folder, "authority"), os.path.join(folder, "authority.key")


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
openssl("req", "-x509", *new_key, "-days", "2", "-subj", "/CN=tests", "-keyout", authority_key, "-out", authority)


def context_for(name):
    """A certificate for this very name: none for `*.localhost` would be believed."""
    base = os.path.join(folder, name)
    openssl("req", "-x509", *new_key, "-days", "2", "-subj", "/CN=box", "-addext", f"subjectAltName=DNS:{name}",
            "-addext", "basicConstraints=critical,CA:false", "-CA", authority, "-CAkey", authority_key,
            "-keyout", f"{base}.key", "-out", base)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(base, f"{base}.key")
    return context


resolve = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **more: resolve(
    "127.0.0.1" if str(host).endswith("localhost") else host, *rest, **more
)


def copy(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for one in (source, target):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def serve(listener, context):
    while True:
        plain, _ = listener.accept()
        threading.Thread(target=handle, args=(plain, context), daemon=True).start()


def handle(plain, context):
    client = context.wrap_socket(plain, server_side=True)
    inner = socket.create_connection((server.hostname, server.port))
    threading.Thread(target=copy, args=(client, inner), daemon=True).start()
    copy(inner, client)


listener = socket.create_server(("127.0.0.1", 0))
contexts = {}


def choose(connection, name, _):
    if name not in contexts:
        contexts[name] = context_for(name)
    connection.context = contexts[name]


context = context_for("localhost")
context.sni_callback = choose
threading.Thread(target=serve, args=(listener, context), daemon=True).start()
os.environ["SSL_CERT_FILE"] = authority
os.environ["E2B_DOMAIN"] = f"localhost:{listener.getsockname()[1]}"
