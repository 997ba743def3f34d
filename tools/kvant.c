/* kvant.c - the command: finds the subcommand or benchmark, prints help and version. Everything
 * else is in cmd_*.c and in the Python package (python_command.c). */
#include "args.h"
#include "command.h"
#include "json.h"
#include "os.h"
#include "plugin.h"

#include <kvant/kvant.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CPU_LEVELS "auto, c, avx2, avx2vnni, avx512, avx512vnni, avx512vbmi, neon or neondot"

typedef struct subcommand {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} subcommand;

enum { MAX_SUBCOMMANDS = 20 };

typedef struct command_list {
    const char *what, *help;           /* "command", "kvant --help lists the commands" */
    subcommand items[MAX_SUBCOMMANDS]; /* a name of NULL ends them */
} command_list;

#ifdef KVANT_HAVE_LLAMA
#define NEEDS_LLAMA(f) f
#define BUILT_FOR "llama.cpp " KVANT_LLAMA_VERSION ", ggml " KVANT_GGML_VERSION
#else
#define NEEDS_LLAMA(f) command_without_llama
#define BUILT_FOR                                                                                  \
    "without llama.cpp: exec, state, search, codecs, plugin-path and bench (not bench model)"
#endif

static int command_bench(int argc, char **argv);

static const command_list commands = {
    "command",
    "kvant --help lists the commands",
    {
        { "exec", command_exec, "run a llama.cpp program with its KV cache compressed" },
        { "run", NEEDS_LLAMA(command_run), "generate text on the compressed cache" },
        { "eval", NEEDS_LLAMA(command_eval),
          "quality: perplexity, KL divergence to f16, top-1 agreement" },
        { "needle", NEEDS_LLAMA(command_needle),
          "whether the model still finds a fact, by context length, depth and codec" },
        { "report", NEEDS_LLAMA(python_command),
          "quality, memory and speed of a model, as one HTML page" },
        { "bench", command_bench,
          "speed of a model, and the error of codecs compared with their papers" },
        { "calibrate", NEEDS_LLAMA(command_calibrate),
          "statistics of a model for the codecs that need them" },
        { "capture", NEEDS_LLAMA(command_capture),
          "keep a model's keys, values and queries in a safetensors file" },
        { "tune", NEEDS_LLAMA(python_command), "a codec for each layer within a budget of bytes" },
        { "inspect", NEEDS_LLAMA(command_inspect),
          "memory of a model's KV caches, and facts about the model" },
        { "state", command_state, "what llama.cpp's files of saved states hold" },
        { "search", python_command, "nearest-neighbour search on compressed vectors" },
        { "codecs", command_codecs, "list the codecs with their codec bits and sources" },
        { "selftest", command_selftest, "check every codec on this machine's CPUs and GPUs" },
        { "plugin-path", command_plugin_path, "print where the llama.cpp plug-in is" },
        { "completion", command_completion,
          "print completion of the command line for bash, zsh or fish" },
    }
};

static const command_list benchmarks = {
    "benchmark",
    "kvant bench --help lists the benchmarks",
    {
        { "model", NEEDS_LLAMA(bench_model), "prefill and decode speed of a model" },
        { "attention", python_command,
          "attention alone on long caches, compared with ggml's flash attention" },
        { "cuda", python_command,
          "decode attention on an NVIDIA GPU, compared with a copy in the same run" },
        { "encode", python_command,
          "time to encode a row on one core, compared with the f16 cache" },
        { "distortion", python_command,
          "error of the codecs on synthetic rows, compared with their papers" },
    }
};

int command_without_llama(int argc, char **argv)
{
    (void)argc;
    complain("%s: this build has no llama.cpp binding", argv[0]);
    hint("make builds with one; or configure with -DKVANT_LLAMA_SRC=DIR, which scripts/fetch.py "
         "headers prints");
    return EXIT_RUNTIME;
}

static void print_list(FILE *out, const command_list *list)
{
    for (const subcommand *s = list->items; s->name != NULL; s++)
        fprintf(out, "  %-12s %s\n", s->name, s->summary);
}

/* --describe: the list for programs. */
static int describe(const command_list *list)
{
    fputs("[", stdout);
    for (const subcommand *s = list->items; s->name != NULL; s++) {
        json_member(stdout, s == list->items ? "\n {" : ",\n {", "name", s->name);
        json_member(stdout, ", ", "summary", s->summary);
        putchar('}');
    }
    puts("\n]");
    return finish_output();
}

static const subcommand *find(const command_list *list, const char *name)
{
    for (const subcommand *s = list->items; s->name != NULL; s++)
        if (strcmp(s->name, name) == 0)
            return s;
    return NULL;
}

static int run(const command_list *list, int argc, char **argv)
{
    const char *names[MAX_SUBCOMMANDS];
    const subcommand *found = find(list, strcmp(argv[0], "list") == 0 ? "codecs" : argv[0]);
    size_t n = 0;
    if (found != NULL)
        return found->run(argc, argv);
    for (; list->items[n].name != NULL; n++)
        names[n] = list->items[n].name;
    return args_unknown_word(list->what, argv[0], names, n, list->help);
}

static bool asks_for_help(const char *word)
{
    return strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
}

static int command_bench(int argc, char **argv)
{
    if (argc < 2) {
        complain("bench: no benchmark given");
        hint("%s", benchmarks.help);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--describe") == 0)
        return describe(&benchmarks);
    if (!asks_for_help(argv[1]))
        return run(&benchmarks, argc - 1, argv + 1);
    puts("usage: kvant bench BENCHMARK [options]\n\nbenchmarks:");
    print_list(stdout, &benchmarks);
    puts("\n  kvant bench BENCHMARK --help   options of a benchmark");
    return finish_output();
}

static void print_usage(FILE *out)
{
    fputs("usage: kvant COMMAND [options]\n\n"
          "Compresses the key-value cache of transformer inference and shows what that costs in "
          "quality\n"
          "and gains in speed and memory.\n\ncommands:\n",
          out);
    print_list(out, &commands);
    fputs("\n  kvant COMMAND --help   options of a command\n"
          "  kvant --cpu LEVEL COMMAND   " CPU_LEVELS "\n"
          "  kvant --version        version, CPU level, llama.cpp this build is for\n\nexamples:\n"
          "  kvant exec -- llama-server -m model.gguf -c 32768\n"
          "  kvant calibrate -m model.gguf -f text.txt -o model.kvcal\n"
          "  kvant eval -m model.gguf -f text.txt --preset balanced --preset small --stock q4_0\n",
          out);
}

static int print_version(void)
{
    printf("kvant %s (CPU level %s; %s)\n", kvant_version(),
           kvant_cpu_level_name(kvant_get_cpu_level()), BUILT_FOR);
    return finish_output();
}

/* `kvant help eval` is `kvant eval --help`. */
static int help_about(char *word)
{
    char help[] = "--help";
    return run(&commands, 2, (char *[]){ word, help, NULL });
}

/* --cpu LEVEL before the command. The linked library gets the level by a call, the plug-in's by the
 * environment. */
static bool set_cpu_level(const char *name)
{
    kvant_cpu_level level;
    if (name == NULL)
        complain("--cpu needs a level: " CPU_LEVELS);
    else if (kvant_cpu_level_from_name(name, &level) != KVANT_OK)
        complain("--cpu: '%s' is not " CPU_LEVELS, name);
    else if (kvant_set_cpu_level(level) != KVANT_OK)
        complain("--cpu: this machine has no %s; kvant --version names its best level", name);
    else
        return os_set_variable(PLUGIN_ENV_CPU, name);
    return false;
}

int main(int argc, char **argv)
{
    if (!os_start())
        return EXIT_RUNTIME;
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
    if (strcmp(word, "--version") == 0 || strcmp(word, "-V") == 0 || strcmp(word, "-v") == 0 ||
        strcmp(word, "version") == 0)
        return print_version();
    if (strcmp(word, "--describe") == 0)
        return describe(&commands);
    if (strcmp(word, "help") == 0 && argc > 2)
        return help_about(argv[2]);
    if (asks_for_help(word) || strcmp(word, "help") == 0) {
        print_usage(stdout);
        return finish_output();
    }
    return run(&commands, argc - 1, argv + 1);
}
