"""Bodies that succeed, and the form that every refusal has."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
C = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
H = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}


def check_error(answer):
    """The error object of `answer`, which must have OpenAI's form."""
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert answer["error"]["type"]
    return answer["error"]


async def refused(server, path, body, status=400):
    """The error object of a request that must be refused."""
    got, answer = await server.post(path, body)
    error = check_error(answer)
    assert got == status, error
    return error
