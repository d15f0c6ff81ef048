"""What only reproduces tables of the five papers: data makers, tasks and studies."""
