/* kvant.c - the command: finds the subcommand, prints help and version. Everything else lives in cmd_*.c. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "args.h"
#include "command.h"
#include "plugin.h"

#include <kvant/kvant.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct subcommand {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} subcommand;

#ifdef KVANT_HAVE_LLAMA
#define NEEDS_LLAMA(f) f
#define BUILT_FOR "llama.cpp " KVANT_LLAMA_VERSION ", ggml " KVANT_GGML_VERSION
#else
#define NEEDS_LLAMA(f) command_without_llama
#define BUILT_FOR "no llama.cpp: exec, codecs, bench distortion and plugin-path only"
#endif

static const subcommand subcommands[] = {
    { "exec", command_exec, "run a llama.cpp program with its KV cache compressed" },
    { "run", NEEDS_LLAMA(command_run), "generate text on the compressed cache" },
    { "eval", NEEDS_LLAMA(command_eval), "quality: perplexity, KL divergence to f16, top-1 agreement" },
    { "needle", NEEDS_LLAMA(command_needle),
      "does the model still find a fact, by context length, depth and codec" },
    { "report", NEEDS_LLAMA(python_command), "all of this for a model, as one HTML page" },
    { "bench", command_bench, "speed of a model, and the error of codecs beside their papers' figures" },
    { "calibrate", NEEDS_LLAMA(command_calibrate), "statistics of a model for the codecs that need them" },
    { "capture", NEEDS_LLAMA(command_capture), "keep a model's keys, values and queries in a safetensors file" },
    { "tune", NEEDS_LLAMA(python_command), "a codec for each layer within a budget of bytes" },
    { "inspect", NEEDS_LLAMA(command_inspect), "a model's facts, and the true bits of caches for it" },
    { "codecs", command_codecs, "list the codecs with their true bits and sources" },
    { "plugin-path", command_plugin_path, "print where the llama.cpp plug-in is" },
};
enum { N_SUBCOMMANDS = sizeof subcommands / sizeof *subcommands };

int command_without_llama(int argc, char **argv)
{
    (void)argc;
    complain("%s: this build has no llama.cpp binding", argv[0]);
    hint("get the headers with scripts/fetch.py headers and configure with -DKVANT_LLAMA_SRC=DIR");
    return EXIT_RUNTIME;
}

static void print_usage(FILE *out)
{
    fputs("usage: kvant COMMAND [options]\n\n"
          "Compresses the key-value cache of transformer inference and shows what that costs in quality\n"
          "and gains in speed and memory.\n\ncommands:\n",
          out);
    for (size_t i = 0; i < N_SUBCOMMANDS; i++)
        fprintf(out, "  %-12s %s\n", subcommands[i].name, subcommands[i].summary);
    fputs("\n  kvant COMMAND --help   options of a command\n"
          "  kvant --cpu LEVEL COMMAND   auto, c, avx2, avx2vnni, avx512, avx512vnni, avx512vbmi, neon or neondot\n"
          "  kvant --version        version, CPU level, llama.cpp this build is for\n\nexamples:\n"
          "  kvant exec -k turboquant-4 -- llama-server -m model.gguf -c 32768\n"
          "  kvant eval -m model.gguf -f text.txt -c 2048 --chunks 4 -k turboquant-4 --stock q4_0\n",
          out);
}

static int print_version(void)
{
    printf("kvant %s (CPU level %s; %s)\n", kvant_version(), kvant_cpu_level_name(kvant_get_cpu_level()),
           BUILT_FOR);
    return finish_output();
}

static const subcommand *find(const char *name)
{
    for (size_t i = 0; i < N_SUBCOMMANDS; i++)
        if (strcmp(subcommands[i].name, name) == 0)
            return &subcommands[i];
    return NULL;
}

static int unknown_command(const char *word)
{
    const char *names[N_SUBCOMMANDS];
    for (size_t i = 0; i < N_SUBCOMMANDS; i++)
        names[i] = subcommands[i].name;
    return args_unknown_word("command", word, names, N_SUBCOMMANDS, "kvant --help lists the commands");
}

/* `kvant help eval` is `kvant eval --help`. */
static int help_about(const char *word)
{
    char help[] = "--help";
    const subcommand *sub = find(word);
    if (sub == NULL)
        return unknown_command(word);
    char name[32];
    snprintf(name, sizeof name, "%s", word);
    char *argv[] = { name, help, NULL };
    return sub->run(2, argv);
}

/* --cpu LEVEL before the command: for the library that is linked in, and by the environment for the plug-in's. */
static bool set_cpu_level(const char *name)
{
    kvant_cpu_level level;
    if (name == NULL)
        complain("--cpu needs a level: auto, c, avx2, avx2vnni, avx512, avx512vnni, avx512vbmi, neon or neondot");
    else if (kvant_cpu_level_from_name(name, &level) != KVANT_OK)
        complain("--cpu: '%s' is not auto, c, avx2, avx2vnni, avx512, avx512vnni, avx512vbmi, neon or neondot",
                 name);
    else if (kvant_set_cpu_level(level) != KVANT_OK)
        complain("--cpu: this machine has no %s; kvant --version names its best level", name);
    else
        return setenv(PLUGIN_ENV_CPU, name, 1) == 0;
    return false;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--cpu") == 0) {
        if (!set_cpu_level(argc > 2 ? argv[2] : NULL))
            return EXIT_USAGE;
        argv += 2;
        argc -= 2;
    }
    if (argc < 2) {
        print_usage(stderr);
        return EXIT_USAGE;
    }
    const char *word = argv[1];
    if (strcmp(word, "--version") == 0)
        return print_version();
    if (strcmp(word, "help") == 0 && argc > 2)
        return help_about(argv[2]);
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0) {
        print_usage(stdout);
        return finish_output();
    }
    const subcommand *sub = find(word);
    return sub != NULL ? sub->run(argc - 1, argv + 1) : unknown_command(word);
}
