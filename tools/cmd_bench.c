/* cmd_bench.c - `kvant bench`: finds the benchmark. */
#include "args.h"
#include "command.h"

#include <stdio.h>
#include <string.h>

#ifdef KVANT_HAVE_LLAMA
#define NEEDS_LLAMA(f) f
#else
#define NEEDS_LLAMA(f) command_without_llama
#endif

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} benchmarks[] = {
    { "model", NEEDS_LLAMA(bench_model), "prefill and decode speed of a model" },
    { "attention", python_command, "attention alone on long caches, beside ggml's flash attention" },
    { "cuda", python_command, "decode attention on an NVIDIA GPU, beside a copy in the same run" },
    { "encode", bench_encode, "time to encode a row, on one core, beside the f16 cache" },
    { "distortion", python_command, "error of the codecs on synthetic rows, beside their papers' figures" },
};
enum { N_BENCHMARKS = sizeof benchmarks / sizeof *benchmarks };

static int print_usage(void)
{
    puts("usage: kvant bench BENCHMARK [options]\n\nbenchmarks:");
    for (size_t i = 0; i < N_BENCHMARKS; i++)
        printf("  %-12s %s\n", benchmarks[i].name, benchmarks[i].summary);
    puts("\n  kvant bench BENCHMARK --help   options of a benchmark");
    return finish_output();
}

static int unknown_benchmark(const char *word)
{
    const char *names[N_BENCHMARKS];
    for (size_t i = 0; i < N_BENCHMARKS; i++)
        names[i] = benchmarks[i].name;
    return args_unknown_word("benchmark", word, names, N_BENCHMARKS, "kvant bench --help lists the benchmarks");
}

int command_bench(int argc, char **argv)
{
    if (argc < 2) {
        complain("bench: no benchmark given");
        hint("kvant bench --help lists the benchmarks");
        return EXIT_USAGE;
    }
    for (size_t i = 0; i < N_BENCHMARKS; i++)
        if (strcmp(argv[1], benchmarks[i].name) == 0)
            return benchmarks[i].run(argc - 1, argv + 1);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
        return print_usage();
    return unknown_benchmark(argv[1]);
}
