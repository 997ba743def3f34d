/* cmd_completion.c - `kvant completion`: prints the scripts of share/completion, which
 * scripts/reference.py makes from the option tables. */
#include "args.h"
#include "command.h"

#include <stdio.h>
#include <string.h>

static const arg_spec spec = {
    .command = "completion",
    .usage = "bash | zsh | fish",
    .about = "Prints a script that completes commands, options and their values. Installations "
             "already have\n"
             "these scripts where the shells look for them.",
    .notes = "examples:\n"
             "  source <(kvant completion bash)\n"
             "  kvant completion zsh > ~/.zfunc/_kvant\n"
             "  kvant completion fish > ~/.config/fish/completions/kvant.fish",
};

/* Made by cmake/embed.cmake. */
extern const unsigned char completion_bash[], completion_zsh[], completion_fish[];
extern const size_t completion_bash_size, completion_zsh_size, completion_fish_size;

static int print_script(const char *shell)
{
    static const char *const names[] = { "bash", "zsh", "fish" };
    const unsigned char *const scripts[] = { completion_bash, completion_zsh, completion_fish };
    const size_t sizes[] = { completion_bash_size, completion_zsh_size, completion_fish_size };
    for (size_t i = 0; i < 3; i++)
        if (strcmp(shell, names[i]) == 0) {
            fwrite(scripts[i], 1, sizes[i], stdout);
            return finish_output();
        }
    return args_unknown_word("shell", shell, names, 3, "kvant completion bash, zsh or fish");
}

int command_completion(int argc, char **argv)
{
    int rest = 0;
    const int code = args_parse(&spec, argc, argv, NULL, &rest);
    if (code >= 0)
        return code;
    if (rest == argc - 1)
        return print_script(argv[rest]);
    complain("completion: %s", rest == argc ? "no shell given" : "more than one shell is given");
    hint("kvant completion bash, zsh or fish");
    return EXIT_USAGE;
}
