"""The openai package, unchanged, through the router to an embedded engine."""

import asyncio

import openai
import pytest

from engines.launch import EngineSpec, LocalLauncher
from rollout.router import Backend, RouterHost
from rollout.testing.tiny_model import make_tiny_model
from tests.rollout.router.conftest import router_config

pytestmark = [pytest.mark.embedded, pytest.mark.slow]


async def test_the_openai_package_completes_chats_and_streams_through_the_router(tmp_path):
    model = make_tiny_model(tmp_path / "model", hidden_size=32, num_layers=1)
    spec = EngineSpec(
        engine_id="e-0",
        kind="embedded",
        model_path=str(model),
        log_path=str(tmp_path / "engine.log"),
    )
    engine = await LocalLauncher().launch(spec)
    host = RouterHost(router_config(client_key="tell"))
    endpoint = await host.start()
    try:
        await host.set_members(1, [Backend("e-0", engine.endpoint, access=engine.access)])
        await host.set_gate("open", weight_version=1)
        base_url = f"{endpoint.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="tell", max_retries=0) as client:
            name = (await client.models.list()).data[0].id
            messages = [{"role": "user", "content": "hi"}]
            options = {"model": name, "max_tokens": 8, "temperature": 0}
            whole = await client.chat.completions.create(messages=messages, **options)
            assert whole.usage.completion_tokens <= 8
            stream = await client.chat.completions.create(messages=messages, stream=True, **options)
            text = ""
            async for part in stream:
                text += part.choices[0].delta.content or ""
            assert text == whole.choices[0].message.content
            completion = await client.completions.create(prompt="hi", **options)
            assert completion.choices[0].finish_reason in ("stop", "length")
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(prompt=[], **options)
            await host.set_gate("closed", reason="training", phase="offloaded")
            with pytest.raises(openai.InternalServerError) as refused:
                await client.completions.create(prompt="hi", **options)
            assert refused.value.status_code == 503
        async with openai.AsyncOpenAI(base_url=base_url, api_key="no", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(prompt="hi", **options)
    finally:
        await host.stop(0)
        await asyncio.shield(engine.kill())
