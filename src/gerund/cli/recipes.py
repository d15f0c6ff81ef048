"""``gerund recipes``: list the bundled training recipes, or print one as YAML."""

import json
from typing import Annotated

import typer


def command(
    name: Annotated[str | None, typer.Argument(help="Print this recipe's YAML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print names and descriptions as JSON.")] = False,
) -> None:
    """List the bundled recipes by what they are for, or print one to start from.

    For example:

        gerund recipes

        gerund recipes unimae-default > mine.yaml
    """
    from gerund.training.recipe import bundled_recipes, find_recipe, recipes_by_purpose

    if name is not None:
        typer.echo(find_recipe(name).read_text("utf-8"), nl=False)
        return
    bundled = bundled_recipes()
    if as_json:
        typer.echo(json.dumps(bundled, indent=1))
        return
    width = max(map(len, bundled))
    for number, (purpose, recipes) in enumerate(recipes_by_purpose().items()):
        typer.echo(("\n" if number else "") + purpose)
        for recipe, summary in recipes.items():
            typer.echo(f"  {recipe:{width}}  {summary}")
    typer.echo(
        "\nmodel.base=MODEL puts your model in the place of a recipe's; gerund adapt --recipe NAME your texts too."
    )
