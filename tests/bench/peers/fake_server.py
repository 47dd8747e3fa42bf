"""A server without an engine: streams "x" for each token asked; the second argument names how it fails."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAILS = sys.argv[2:] == ["fails"]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self._answer(200, {"data": [{"id": "fake-model"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if FAILS or asked["model"] != "fake-model":
            self._answer(500, {"error": {"message": "out of pages"}})
            return
        self.send_response(200)
        self.end_headers()
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        for _ in range(asked["max_tokens"]):
            self._event(json.dumps({"choices": [{"text": "x"}]}))
        self._event(json.dumps({"choices": [], "usage": usage}))
        self._event("[DONE]")

    def _event(self, data):
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
