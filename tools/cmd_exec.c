/* cmd_exec.c - `kvant exec`: becomes a llama.cpp program that has the plug-in loaded.
 *
 * A llama.cpp program loads GGML_BACKEND_PATH always when its back ends are separate files, but only on
 * --device and the like when they are linked in, so --device is what makes the plug-in work everywhere. A GPU
 * type device is given the cache with -ngl only (the weights stay on the CPU: the device has no operation for
 * them), and its attention is the flash attention operation.
 */
#define _GNU_SOURCE
#include "args.h"
#include "command.h"
#include "plugin.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OPT_K, OPT_V, OPT_PROTECT, OPT_PROTECT_CODEC, OPT_CALIBRATION };

static const arg_option options[] = {
    { OPT_K, 'k', "codec-k", "SPEC", "codec of keys (default: KVANT_K, else " DEFAULT_K ")" },
    { OPT_V, 'v', "codec-v", "SPEC", "codec of values (default: the one of -k, else KVANT_V)" },
    { OPT_PROTECT, 0, "protect", "N",
      "the first N and the last N layers use another codec\n"
      "(default: KVANT_PROTECT, else 0)" },
    { OPT_PROTECT_CODEC, 0, "protect-codec", "SPEC",
      "that codec, for keys and values (default:\nKVANT_PROTECT_CODEC, else " PLUGIN_PROTECT_CODEC ")" },
    { OPT_CALIBRATION, 0, "calibration", "FILE",
      "for codecs that need one; kvant calibrate makes it\n(default: KVANT_CALIBRATION)" },
};

static const arg_spec spec = {
    .command = "exec",
    .usage = "[-k SPEC] [-v SPEC] [--protect N] [--calibration FILE] [--] PROGRAM [ARGUMENTS]",
    .about = "Runs a llama.cpp program (llama-server, llama-cli, llama-bench, ...) with kvant's KV cache. Sets\n"
             "GGML_BACKEND_PATH, KVANT_K, KVANT_V and the like, and for programs named llama* adds --device\n"
             "KVANT, -ngl 99 and -fa on unless they are given. Other programs get the environment only.",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .notes = "exit code: the program's; 127 when it does not exist.\n\nexample:\n"
             "  kvant exec -k turboquant-4 -- llama-server -m model.gguf -c 32768",
};

static bool handle(void *user, int id, const char *value)
{
    plugin_settings *s = user;
    switch (id) {
    case OPT_K: s->k = value; return true;
    case OPT_V: s->v = value; return true;
    case OPT_PROTECT: return args_u32("--protect", value, 0, PLUGIN_MAX_PROTECT, &s->protect);
    case OPT_PROTECT_CODEC: s->protect_codec = value; return true;
    default: s->calibration = value; return true;
    }
}

static const char *env_or_null(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != 0 ? value : NULL;
}

/* -k alone means "both": a reader of `-k turboquant-4` does not expect 16-bit values beside it. */
static void resolve_specs(plugin_settings *s)
{
    const bool k_given = s->k != NULL;
    if (s->k == NULL)
        s->k = env_or_null(PLUGIN_ENV_K);
    if (s->v == NULL && !k_given)
        s->v = env_or_null(PLUGIN_ENV_V);
    const bool none_given = s->k == NULL && s->v == NULL;
    if (s->k == NULL)
        s->k = none_given ? DEFAULT_K : s->v;
    if (s->v == NULL)
        s->v = none_given ? DEFAULT_V : s->k;
}

static bool protect_from_environment(plugin_settings *s)
{
    const char *protect = env_or_null(PLUGIN_ENV_PROTECT);
    return protect == NULL || args_u32(PLUGIN_ENV_PROTECT, protect, 0, PLUGIN_MAX_PROTECT, &s->protect);
}

static bool check(const plugin_settings *s)
{
    kvant_calibration *calibration;
    if (!plugin_load_calibration(s->calibration, &calibration))
        return false;
    const bool ok = plugin_check(s, calibration);
    kvant_calibration_free(&calibration);
    return ok;
}

/* A flag that a llama.cpp program needs, its other spellings, and the variable that sets it from outside. */
typedef struct needed_flag {
    const char *names[4];
    const char *value;
    const char *variable;
} needed_flag;

static const needed_flag needed[] = {
    { { "--device", "-dev", NULL }, PLUGIN_DEVICE, "LLAMA_ARG_DEVICE" },
    { { "-ngl", "--gpu-layers", "--n-gpu-layers", NULL }, "99", "LLAMA_ARG_N_GPU_LAYERS" },
    { { "-fa", "--flash-attn", NULL }, "on", "LLAMA_ARG_FLASH_ATTN" },
};
enum { N_NEEDED = sizeof needed / sizeof *needed };

static const char *given_value(const needed_flag *flag, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        for (size_t n = 0; flag->names[n] != NULL; n++)
            if (strcmp(argv[i], flag->names[n]) == 0)
                return i + 1 < argc ? argv[i + 1] : "";
    return env_or_null(flag->variable);
}

static bool is_llama_program(const char *program)
{
    const char *slash = strrchr(program, '/');
    return strncmp(slash != NULL ? slash + 1 : program, "llama", 5) == 0;
}

/* The program's argument vector with what it lacks added at the end; NULL without memory. */
static char **build_arguments(int argc, char **argv)
{
    char **out = calloc((size_t)argc + 2 * N_NEEDED + 1, sizeof *out);
    if (out == NULL)
        return NULL;
    int n = 0;
    for (; n < argc; n++)
        out[n] = argv[n];
    if (!is_llama_program(argv[0]))
        return out;
    for (size_t i = 0; i < N_NEEDED; i++) {
        const char *given = given_value(&needed[i], argc, argv);
        if (given == NULL) {
            out[n++] = (char *)needed[i].names[0]; /* execvp does not write to its arguments */
            out[n++] = (char *)needed[i].value;
        } else if (i == 0 && strstr(given, PLUGIN_DEVICE) == NULL) {
            complain("exec: the device is set to '%s', so the cache will not be kvant's", given);
            hint("leave --device and LLAMA_ARG_DEVICE out, or name " PLUGIN_DEVICE " there");
        }
    }
    return out;
}

static int exec_failed(const char *program)
{
    const int error = errno;
    complain("exec: %s: %s", program, strerror(error));
    if (error != ENOENT)
        return EXIT_RUNTIME;
    hint("give the program's path, or put its folder on PATH");
    return EXIT_NOT_FOUND;
}

int command_exec(int argc, char **argv)
{
    plugin_settings s = { .protect_codec = env_or_null(PLUGIN_ENV_PROTECT_CODEC),
                          .calibration = env_or_null(PLUGIN_ENV_CALIBRATION) };
    int rest = 0;
    if (!protect_from_environment(&s))
        return EXIT_USAGE;
    const int code = args_parse(&spec, argc, argv, handle, &s, &rest);
    if (code >= 0)
        return code;
    if (rest >= argc) {
        complain("exec: no program given");
        hint("kvant exec -k " DEFAULT_K " -v " DEFAULT_V " -- llama-server -m model.gguf");
        return EXIT_USAGE;
    }
    resolve_specs(&s);
    if (!check(&s))
        return EXIT_USAGE;
    char path[PATH_MAX];
    if (!plugin_path(path, sizeof path) || !plugin_set(&s))
        return EXIT_RUNTIME;
    if (setenv("GGML_BACKEND_PATH", path, 1) != 0)
        return exec_failed(argv[rest]);
    char **arguments = build_arguments(argc - rest, argv + rest);
    if (arguments == NULL) {
        complain("exec: out of memory");
        return EXIT_RUNTIME;
    }
    execvp(arguments[0], arguments);
    free(arguments);
    return exec_failed(argv[rest]);
}
