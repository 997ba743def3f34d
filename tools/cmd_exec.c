/* cmd_exec.c - `kvant exec`: becomes a llama.cpp program that has the plug-in loaded.
 *
 * A llama.cpp program loads GGML_BACKEND_PATH always when its back ends are separate files, but only on
 * --device and the like when they are linked in, so --device is what makes the plug-in work everywhere. A GPU
 * type device is given the cache with -ngl only (the weights stay on the CPU: the device has no operation for
 * them), and its attention is the flash attention operation.
 */
#define _GNU_SOURCE
#include "args.h"
#include "choices.h"
#include "command.h"
#include "plugin.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct exec_options {
    kvant_scheme_params cache;
    bool accel, verbose, quiet;
} exec_options;
#define AT(member) offsetof(exec_options, member)
#define NOT_GIVEN UINT32_MAX /* of --protect */

static const arg_option options[] = {
    ARG_TEXT(0, "preset", "NAME", cache.preset,
             "quality, balanced, small or tiny: about 5, 4, 3 and 2 bits\n(default: KVANT_PRESET, else " KVANT_PRESET_DEFAULT ")"),
    ARG_TEXT(0, "config", "FILE", cache.settings,
             "a codec for each layer, from a settings file (default:\nKVANT_CONFIG); kvant tune makes it"),
    ARG_TEXT('k', "codec-k", "SPEC", cache.k, "codec of keys instead (default: KVANT_K); see kvant codecs"),
    ARG_TEXT('v', "codec-v", "SPEC", cache.v, "codec of values (default: the one of -k, else KVANT_V)"),
    ARG_U32(0, "protect", "N", 0, PLUGIN_MAX_PROTECT, cache.protect,
            "the first N and the last N layers use another codec\n(default: KVANT_PROTECT, else 0)"),
    ARG_TEXT(0, "protect-codec", "SPEC", cache.protect_codec,
             "codec of these layers, keys and values (default:\nKVANT_PROTECT_CODEC, else " PLUGIN_PROTECT_CODEC ")"),
    ARG_TEXT(0, "calibration", "FILE", cache.calibration,
             "calibration, for all presets and some codecs (default:\n"
             "KVANT_CALIBRATION, else model.kvcal beside the program's -m\nmodel.gguf); kvant calibrate makes it"),
    ARG_SWITCH(0, "accel", accel,
               "no codecs: kvant computes attention on llama.cpp's own cache,\n"
               "which the program's -ctk and -ctv choose: f16, q8_0, q4_0, ..."),
    ARG_SWITCH(0, "verbose", verbose, "say what is compressed with which codec, layer by layer\n(sets KVANT_VERBOSE=1)"),
    ARG_SWITCH(0, "quiet", quiet, "no line about the cache at the start (sets KVANT_QUIET=1)"),
};

static const arg_spec spec = {
    .command = "exec",
    .usage = "[--preset NAME | --config FILE | -k SPEC [-v SPEC]] [--protect N] [--calibration FILE]\n"
             "                  [--accel] [--] PROGRAM [ARGUMENTS]",
    .about = "Runs a llama.cpp program (llama-server, llama-cli, llama-bench, ...) with kvant's KV cache.\n"
             "Programs named llama* get --device KVANT, -ngl 99 and -fa on, unless these are given. Other programs\n"
             "get the environment only: GGML_BACKEND_PATH, KVANT_K, KVANT_V and the like.",
    ARG_OPTIONS(options),
    .notes = "Ends with the exit status of the program, or 127 when it does not exist.\n\nexample:\n"
             "  kvant exec -- llama-server -m model.gguf -c 32768\n"
             "  kvant exec --preset small -- llama-server -m model.gguf -c 32768\n"
             "  kvant exec --accel -- llama-server -m model.gguf -c 32768 -ctk q8_0 -ctv q8_0",
};

static const char *env_or_null(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != 0 ? value : NULL;
}

/* What chooses the codecs: a preset, a settings file or specs; of the environment where the command line has none of them. -k alone
 * means "both": a reader of `-k turboquant-4` does not expect 16-bit values beside it. */
static bool one_choice(kvant_scheme_params *p)
{
    const bool k = p->k != NULL, specs = k || p->v != NULL, given = specs || p->preset != NULL || p->settings != NULL;
    if (!given) {
        p->preset = env_or_null(PLUGIN_ENV_PRESET);
        p->settings = env_or_null(PLUGIN_ENV_CONFIG);
    }
    if ((!given || specs) && !k) {
        p->k = env_or_null(PLUGIN_ENV_K);
        p->v = p->v != NULL ? p->v : env_or_null(PLUGIN_ENV_V);
    }
    if ((p->preset != NULL) + (p->settings != NULL) + (p->k != NULL || p->v != NULL) > 1) {
        complain(given ? "exec: of --preset, --config and -k only one can choose the codecs"
                       : "exec: of KVANT_PRESET, KVANT_CONFIG and KVANT_K, KVANT_V only one can choose the codecs");
        return hint("leave out all but one of them");
    }
    if (p->settings == NULL || (p->protect == 0 && p->protect_codec == NULL))
        return true;
    complain("exec: %s%s says what every layer uses: no --protect or KVANT_PROTECT beside it",
             choice_is_from(p->settings, PLUGIN_ENV_CONFIG) ? PLUGIN_ENV_CONFIG "=" : "--config ",
             p->settings);
    return hint("leave out one of them");
}

static bool protect_from_environment(kvant_scheme_params *p)
{
    const char *protect = env_or_null(PLUGIN_ENV_PROTECT);
    if (p->protect != NOT_GIVEN)
        return true;
    p->protect = 0;
    return protect == NULL || args_u32(PLUGIN_ENV_PROTECT, protect, 0, PLUGIN_MAX_PROTECT, &p->protect);
}

/* A flag that a llama.cpp program needs, its other spellings, and the variable that sets it from outside. */
typedef struct needed_flag {
    const char *names[4];
    const char *value;
    const char *variable;
} needed_flag;

enum { MAX_NEEDED = 3 };
static const needed_flag needed[] = {
    { { "--device", "-dev", NULL }, PLUGIN_DEVICE, "LLAMA_ARG_DEVICE" },
    { { "-ngl", "--gpu-layers", "--n-gpu-layers", NULL }, "99", "LLAMA_ARG_N_GPU_LAYERS" },
    { { "-fa", "--flash-attn", NULL }, "on", "LLAMA_ARG_FLASH_ATTN" },
};
/* An ACCEL device is not chosen: all there are take part. -ot none=CPU overrides no tensor; builds with linked back ends load the
 * plug-in only for such an option. */
static const needed_flag needed_by_accel[] = {
    { { "-fa", "--flash-attn", NULL }, "on", "LLAMA_ARG_FLASH_ATTN" },
    { { "-ot", "--override-tensor", NULL }, "none=CPU", "LLAMA_ARG_OVERRIDE_TENSOR" },
    { { NULL }, NULL, NULL },
};

/* Options that keep the cache from the device, or make it one that the device cannot have. */
static const needed_flag cache_types[] = {
    { { "-ctk", "--cache-type-k", NULL }, NULL, "LLAMA_ARG_CACHE_TYPE_K" },
    { { "-ctv", "--cache-type-v", NULL }, NULL, "LLAMA_ARG_CACHE_TYPE_V" },
};
static const needed_flag no_offload = { { "-nkvo", "--no-kv-offload", NULL }, NULL, "LLAMA_ARG_NO_KV_OFFLOAD" };

/* Not needed by the device: where its calibration may lie. */
static const needed_flag model_flag = { { "-m", "--model", NULL }, NULL, "LLAMA_ARG_MODEL" };

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

static bool is_off(const char *value)
{
    static const char *const words[] = { "off", "0", "false", "disabled" };
    for (size_t i = 0; value != NULL && i < sizeof words / sizeof *words; i++)
        if (strcmp(value, words[i]) == 0)
            return true;
    return false;
}

/* What would end the program, or its cache, later and without a reason. */
static bool check_program_options(int argc, char **argv, bool accel)
{
    const needed_flag *attention = accel ? &needed_by_accel[0] : &needed[2];
    if (!is_llama_program(argv[0]))
        return true;
    if (is_off(given_value(attention, argc, argv))) {
        complain("exec: -fa off: attention must be one operation, flash attention, for kvant to compute it");
        return hint("leave -fa and %s out", attention->variable);
    }
    for (size_t i = 0; !accel && i < sizeof cache_types / sizeof *cache_types; i++) {
        const char *type = given_value(&cache_types[i], argc, argv);
        if (type == NULL || strcmp(type, "f16") == 0)
            continue;
        complain("exec: %s %s is a cache of llama.cpp's own, kvant compresses what llama.cpp takes for f16",
                 cache_types[i].names[0], type);
        return hint("leave -ctk and -ctv out (%s, too); or kvant exec --accel, for kvant's attention on that cache",
             cache_types[i].variable);
    }
    return true;
}

/* llama.cpp says nothing of it. How many layers another -ngl leaves out is said by the plug-in, which sees them. */
static void warn_of_uncompressed(int argc, char **argv)
{
    const char *layers = given_value(&needed[1], argc, argv);
    const bool stays = given_value(&no_offload, argc, argv) != NULL || is_off(env_or_null("LLAMA_ARG_KV_OFFLOAD"));
    if (!stays && (layers == NULL || strcmp(layers, "0") != 0))
        return;
    complain("exec: warning: with %s no layer's cache is kvant's, all of it stays uncompressed",
             stays ? "-nkvo" : "-ngl 0");
    hint("leave it out: weights stay on the CPU in any case");
}

/* Whether ggml's CUDA back end lies beside the program, as in builds whose back ends are files. With it --accel needs the device, too. */
static bool has_cuda(const char *program)
{
    const char *folders = strchr(program, '/') != NULL ? "" : getenv("PATH");
    char path[PATH_MAX], real[PATH_MAX];
    for (const char *at = folders; at != NULL; at = *at == ':' ? at + 1 : NULL) {
        const int n = (int)strcspn(at, ":");
        if (snprintf(path, sizeof path, "%.*s%s%s", n, at, n > 0 ? "/" : "", program) < (int)sizeof path && access(path, X_OK) == 0 &&
            realpath(path, real) != NULL) {
            *strrchr(real, '/') = '\0';
            return snprintf(path, sizeof path, "%s/libggml-cuda.so", real) < (int)sizeof path && access(path, R_OK) == 0;
        }
        at += n;
    }
    return false;
}

/* The program's argument vector with what it lacks added at the end; NULL without memory. */
static char **build_arguments(int argc, char **argv, bool accel)
{
    const needed_flag *flags = accel && !has_cuda(argv[0]) ? needed_by_accel : needed;
    char **out = calloc((size_t)argc + 2 * MAX_NEEDED + 1, sizeof *out);
    if (out == NULL)
        return NULL;
    int n = 0;
    for (; n < argc; n++)
        out[n] = argv[n];
    if (!is_llama_program(argv[0]))
        return out;
    for (size_t i = 0; i < MAX_NEEDED && flags[i].value != NULL; i++) {
        const char *given = given_value(&flags[i], argc, argv);
        if (given == NULL) {
            out[n++] = program_argument(flags[i].names[0]);
            out[n++] = program_argument(flags[i].value);
        } else if (!accel && i == 0 && strstr(given, PLUGIN_DEVICE) == NULL) {
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

/* The codecs of the cache, checked, in the environment. 0 or an exit code. */
static int set_codecs(exec_options *o)
{
    kvant_scheme *scheme;
    bool told = false;
    kvant_scheme_params *p = &o->cache;
    p->protect_codec = p->protect_codec != NULL ? p->protect_codec : env_or_null(PLUGIN_ENV_PROTECT_CODEC);
    p->calibration = p->calibration != NULL ? p->calibration : env_or_null(PLUGIN_ENV_CALIBRATION);
    if (!protect_from_environment(p) || !one_choice(p) || !scheme_make(&o->cache, &scheme, &told))
        return EXIT_USAGE;
    const bool ok = plugin_set(&o->cache, scheme, false);
    kvant_scheme_free(&scheme);
    return ok ? 0 : EXIT_RUNTIME;
}

/* Without codecs: variables of an earlier use do not matter and must not be checked. */
static int set_accel(const exec_options *o)
{
    const kvant_scheme_params *p = &o->cache;
    if (p->preset != NULL || p->settings != NULL || p->k != NULL || p->v != NULL || p->protect != NOT_GIVEN ||
        p->protect_codec != NULL || p->calibration != NULL) {
        complain("exec: --accel leaves llama.cpp's own cache as it is: no options of codecs beside it");
        hint("types of llama.cpp's cache are the program's options: -ctk q8_0 -ctv q8_0");
        return EXIT_USAGE;
    }
    return plugin_set(&(kvant_scheme_params){ .k = NULL }, NULL, false) && setenv(PLUGIN_ACCEL, "1", 1) == 0 ? 0 : EXIT_RUNTIME;
}

int command_exec(int argc, char **argv)
{
    exec_options o = { .cache = { .size = sizeof o.cache, .protect = NOT_GIVEN } };
    int rest = 0;
    int code = args_parse(&spec, argc, argv, &o, &rest);
    if (code >= 0)
        return code;
    if (rest >= argc) {
        complain("exec: no program given");
        hint("kvant exec -- llama-server -m model.gguf");
        return EXIT_USAGE;
    }
    if (!check_program_options(argc - rest, argv + rest, o.accel))
        return EXIT_USAGE;
    o.cache.model = given_value(&model_flag, argc - rest, argv + rest);
    code = o.accel ? set_accel(&o) : set_codecs(&o);
    char path[PATH_MAX];
    if (code != 0)
        return code;
    if (!plugin_path(path, sizeof path))
        return EXIT_RUNTIME;
    if (setenv("GGML_BACKEND_PATH", path, 1) != 0 || (!o.accel && unsetenv(PLUGIN_ACCEL) != 0) ||
        (o.verbose && setenv(PLUGIN_ENV_VERBOSE, "1", 1) != 0) || (o.quiet && setenv(PLUGIN_ENV_QUIET, "1", 1) != 0))
        return exec_failed(argv[rest]);
    if (!o.accel && is_llama_program(argv[rest]))
        warn_of_uncompressed(argc - rest, argv + rest);
    if (o.accel && !o.quiet && is_llama_program(argv[rest]))
        say_line("kvant: ", "attention on llama.cpp's own cache, of the types that -ctk and -ctv name: no codec, no calibration");
    char **arguments = build_arguments(argc - rest, argv + rest, o.accel);
    if (arguments == NULL) {
        complain("exec: out of memory");
        return EXIT_RUNTIME;
    }
    execvp(arguments[0], arguments);
    free(arguments);
    return exec_failed(argv[rest]);
}
