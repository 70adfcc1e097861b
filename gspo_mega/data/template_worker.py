"""The process that renders a chat template.

    python -P template_worker.py PARENT

It runs as a file, and imports jinja2 but no module of gspo_mega. A template is a program that comes with the
checkpoint. Jinja's sandbox keeps it from files and attributes, but not from taking all memory or time; this process has
bounds on both, and its end harms nothing else.

The first line of standard input is {"template", "values", "cpu_seconds", "memory_bytes"}. Each further line is
{"messages", "tools", "open"}; with `open`, the text ends where the assistant's answer begins. The process answers each
of these with one line, {"text"} or {"error"}. It ends when its input or the process PARENT ends.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from datetime import datetime

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

PR_SET_PDEATHSIG = 1


class Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training masks. Here its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

    def content(self, caller):
        return caller()


def environment():
    """The Jinja environment that Hugging Face tokenizers give a chat template, so that the text is the same."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message):
    raise TemplateError(message)


def main():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C
    replies = sys.stdout.buffer
    setup = json.loads(sys.stdin.buffer.readline())
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + setup["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = None
    for line in sys.stdin.buffer:
        # SIGPROF ends the process. It counts the process's own CPU time, so a busy machine does not trigger it.
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_seconds"])
        try:
            template = template or environment().from_string(setup["template"])
            asked = json.loads(line)
            text = template.render(
                messages=asked["messages"],
                tools=asked["tools"],
                documents=None,
                add_generation_prompt=asked["open"],
                **setup["values"],
            )
            reply = json.dumps({"text": text}).encode()
        except MemoryError:
            text = reply = None
            reply = b'{"error": null}'
        except Exception as error:  # a template may raise anything
            reply = json.dumps({"error": f"{error}"[:1000] or type(error).__name__}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
