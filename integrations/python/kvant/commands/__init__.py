"""Commands of the `kvant` program that start other commands or do experiments: kvant.commands.NAME
is `kvant NAME`.

The program starts them (tools/python_command.c), so that users see one command. A module has
`main(words)`, which gets the words after its name and returns an exit code. The commands need only
the standard library, unless their help says otherwise."""
