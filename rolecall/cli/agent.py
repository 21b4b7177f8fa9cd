"""The command `rolecall agent`."""

import typer

app = typer.Typer()


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,  # the agent's own parser answers --help
)
def agent(ctx: typer.Context) -> int:
    """Run the agent of this node."""
    # The agent parses its own arguments, so that it starts without typer and pydantic.
    from rolecall.agent.daemon import main

    return main(ctx.args)
