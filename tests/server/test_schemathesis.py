"""The OpenAPI document against the server, by schemathesis, which comes with the extra `clients`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serving_app import Running, Start

pytest_plugins = ["serving_app"]
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

CASES = int(os.environ.get("QWENONNX_FUZZ_CASES", "0"))


@pytest.fixture(scope="module")
def small(start_shared: Start) -> Running:
    """A server whose context is short, so that no answer takes long."""
    return start_shared("Hello", context_length=96)


def test_requests_made_from_the_document_get_what_it_promises(small: Running) -> None:
    """Valid and invalid requests: no server error, only documented statuses, types and forms of answers."""
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    schema = schemathesis.openapi.from_dict(small.http.get("/openapi.json").json())
    operations = [each.ok() for each in schema.get_all_operations()]
    assert len(operations) >= 9
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    strategies = [
        operation.as_strategy(generation_mode=mode)
        for operation in operations
        for mode in modes
        if operation.body or operation.path_parameters or mode is GenerationMode.POSITIVE
    ]

    @settings(
        max_examples=max(CASES // 20, 200),  # making a case takes far longer than answering it
        derandomize=not CASES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(strategies))
    def check(case: schemathesis.Case) -> None:
        response = case.call(base_url=small.url)
        case.validate_response(
            response,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    check()
    assert small.chat().json()["choices"][0]["message"]["content"] == "Hello"
