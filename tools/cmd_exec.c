/* cmd_exec.c - `kvant exec`: becomes a llama.cpp program that has the plug-in loaded.
 *
 * A llama.cpp program always loads GGML_BACKEND_PATH when its back ends are separate files. When
 * they are linked in, it does so only for --device and the like, so exec adds --device. A device of
 * the GPU type is given the cache only with -ngl, and computes attention only as flash attention.
 * In the computer's memory the device takes no weights: exec_offload.c names the GPUs instead where
 * the program lists some. */
#include "args.h"
#include "choices.h"
#include "command.h"
#include "devices.h"
#include "exec_gpu.h"
#include "exec_watch.h"
#include "os.h"
#include "plugin.h"
#include "program.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct exec_options {
    kvant_scheme_params cache;
    bool accel, verbose, quiet;
} exec_options;
#define AT(member) offsetof(exec_options, member)
#define NOT_GIVEN UINT32_MAX /* of --protect */

static const arg_option options[] = {
    ARG_TEXT(0, "preset", "NAME", cache.preset,
             "quality, balanced, small or tiny: about 5, 4, 3 and 2 bits\n(default: KVANT_PRESET, "
             "else " KVANT_PRESET_DEFAULT ")"),
    ARG_TEXT(0, "config", "FILE", cache.settings,
             "a codec for each layer, from a settings file (default:\nKVANT_CONFIG); kvant tune "
             "makes it"),
    ARG_TEXT('k', "codec-k", "SPEC", cache.k,
             "codec of keys instead (default: KVANT_K); see kvant codecs"),
    ARG_TEXT('v', "codec-v", "SPEC", cache.v,
             "codec of values (default: the one of -k, else KVANT_V)"),
    ARG_U32(
        0, "protect", "N", 0, PLUGIN_MAX_PROTECT, cache.protect,
        "the first N and the last N layers use another codec\n(default: KVANT_PROTECT, else 0)"),
    ARG_TEXT(0, "protect-codec", "SPEC", cache.protect_codec,
             "codec of these layers, keys and values (default:\nKVANT_PROTECT_CODEC, "
             "else " PLUGIN_PROTECT_CODEC ")"),
    ARG_TEXT(0, "calibration", "FILE", cache.calibration,
             "calibration, for all presets and some codecs (default:\n"
             "KVANT_CALIBRATION, else model.kvcal next to the program's -m\nmodel.gguf); kvant "
             "calibrate makes it"),
    ARG_SWITCH(0, "accel", accel,
               "no codecs: kvant computes attention on llama.cpp's own cache,\n"
               "which the program's -ctk and -ctv choose: f16, q8_0, q4_0, ..."),
    ARG_SWITCH(0, "verbose", verbose, "print the codec of each layer (sets KVANT_VERBOSE=1)"),
    ARG_SWITCH(0, "quiet", quiet,
               "print no line about the cache at the start (sets KVANT_QUIET=1)"),
};

static const arg_spec spec = {
    .command = "exec",
    .usage =
        "[--preset NAME | --config FILE | -k SPEC [-v SPEC]] [--protect N] [--calibration FILE]\n"
        "                  [--accel] [--] PROGRAM [ARGUMENTS]",
    .about =
        "Runs a llama.cpp program (llama-server, llama-cli, llama-bench, ...) with kvant's KV "
        "cache.\n"
        "\n"
        "A program named llama* also gets --device KVANT, -ngl 99 and -fa on, unless they are "
        "given.\n"
        "Other words may stand before it: taskset -c 0 llama-server. With GPUs that are not "
        "CUDA's,\n"
        "it gets the names of these GPUs instead of KVANT.\n"
        "\n"
        "Any other program gets variables only: GGML_BACKEND_PATH, KVANT_K and the like. If it\n"
        "starts a llama.cpp program, that one reads LLAMA_ARG_DEVICE, LLAMA_ARG_N_GPU_LAYERS,\n"
        "LLAMA_ARG_FLASH_ATTN and OLLAMA_FLASH_ATTENTION, which are set unless they exist. With\n"
        "GPUs that are not CUDA's, LLAMA_ARG_OVERRIDE_TENSOR takes the place of LLAMA_ARG_DEVICE.",
    ARG_OPTIONS(options),
    .notes = "Ends with the exit status of the program, or 127 when it does not exist. When the "
             "program opens\n"
             "a model and its cache does not become kvant's, one line says why.\n\nexample:\n"
             "  kvant exec -- llama-server -m model.gguf -c 32768\n"
             "  kvant exec --preset small -- llama-server -m model.gguf -c 32768\n"
             "  kvant exec --accel -- llama-server -m model.gguf -c 32768 -ctk q8_0 -ctv q8_0",
};

static const char *env_or_null(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != 0 ? value : NULL;
}

/* Checks that one thing chooses the codecs: a preset, a settings file or specs. The environment
 * counts where the command line names none. -k alone means both keys and values: a reader of
 * `-k turboquant-4` does not expect 16-bit values. */
static bool one_choice(kvant_scheme_params *p)
{
    const bool k = p->k != NULL, specs = k || p->v != NULL,
               given = specs || p->preset != NULL || p->settings != NULL;
    if (!given) {
        p->preset = env_or_null(PLUGIN_ENV_PRESET);
        p->settings = env_or_null(PLUGIN_ENV_CONFIG);
    }
    if ((!given || specs) && !k) {
        p->k = env_or_null(PLUGIN_ENV_K);
        p->v = p->v != NULL ? p->v : env_or_null(PLUGIN_ENV_V);
    }
    if ((p->preset != NULL) + (p->settings != NULL) + (p->k != NULL || p->v != NULL) > 1) {
        complain(given ? "exec: only one of --preset, --config and -k can choose the codecs"
                       : "exec: only one of KVANT_PRESET, KVANT_CONFIG and KVANT_K with KVANT_V "
                         "can choose the codecs");
        return hint("leave out all but one of them");
    }
    if (p->settings == NULL || (p->protect == 0 && p->protect_codec == NULL))
        return true;
    complain(
        "exec: %s%s sets the codec of every layer, so --protect and KVANT_PROTECT do not apply",
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
    return protect == NULL ||
           args_u32(PLUGIN_ENV_PROTECT, protect, 0, PLUGIN_MAX_PROTECT, &p->protect);
}

/* A flag that a llama.cpp program needs, unless it is given one. */
typedef struct needed_flag {
    const program_option *option;
    char name[12], value[12];
} needed_flag;

static const program_option option_attention = { { "-fa", "--flash-attn", NULL },
                                                 { "LLAMA_ARG_FLASH_ATTN", NULL } };
static const program_option option_tensors = { { "-ot", "--override-tensor", NULL },
                                               { "LLAMA_ARG_OVERRIDE_TENSOR", NULL } };

enum { MAX_NEEDED = 3 };
static needed_flag needed[MAX_NEEDED] = {
    { &option_device, "--device", PLUGIN_DEVICE },
    { &option_layers, "-ngl", "99" },
    { &option_attention, "-fa", "on" },
};
/* An ACCEL device is not chosen: all there are take part. -ot none=CPU overrides no tensor; builds
 * with linked back ends load the plug-in only for such an option. */
static needed_flag needed_by_accel[MAX_NEEDED] = {
    { &option_attention, "-fa", "on" },
    { &option_tensors, "-ot", "none=CPU" },
};

/* Types of llama.cpp's caches, which the device KVANT cannot have: of the model, then of a model
 * that drafts. Older versions of llama.cpp have other names of the latter's variables. */
enum { N_MODEL_TYPES = 2, N_TYPES = 4 };
static const program_option option_types[N_TYPES] = {
    { { "-ctk", "--cache-type-k", NULL }, { "LLAMA_ARG_CACHE_TYPE_K", NULL } },
    { { "-ctv", "--cache-type-v", NULL }, { "LLAMA_ARG_CACHE_TYPE_V", NULL } },
    { { "-ctkd", "--cache-type-k-draft", "--spec-draft-type-k", NULL },
      { "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K", "LLAMA_ARG_CACHE_TYPE_K_DRAFT", NULL } },
    { { "-ctvd", "--cache-type-v-draft", "--spec-draft-type-v", NULL },
      { "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V", "LLAMA_ARG_CACHE_TYPE_V_DRAFT", NULL } },
};
static const program_option option_draft_device = {
    { "-devd", "--device-draft", "--spec-draft-device", NULL }, { NULL }
};
static const program_option option_draft_layers = {
    { "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl", NULL },
    { "LLAMA_ARG_N_GPU_LAYERS_DRAFT", NULL }
};

/* Whether the draft model has its cache elsewhere, where every type is possible. */
static bool drafts_elsewhere(const program *p, const device_list *list)
{
    const char *devices = program_value(p, &option_draft_device, NULL);
    const char *layers = program_value(p, &option_draft_layers, NULL);
    return (devices != NULL && !gpu_names_kvant(devices, list)) ||
           (layers != NULL && strcmp(layers, "0") == 0);
}

static bool refuse_type(const program_option *option, const char *name, const char *type,
                        bool of_draft)
{
    const bool is_short = strcmp(name, option->names[0]) == 0;
    complain("exec: %s %s%s%s chooses a cache of llama.cpp's own, but kvant needs one that "
             "llama.cpp takes for f16",
             option->names[0], type, is_short ? "" : ", given by ", is_short ? "" : name);
    if (of_draft)
        return hint("leave %s out, or add -devd none: the draft model then computes on the CPU "
                    "with this cache",
                    name);
    return hint("leave %s out, or use kvant exec --accel for kvant's attention on that cache",
                name);
}

static bool check_types(const program *p, const device_list *list)
{
    for (size_t i = 0; i < N_TYPES; i++) {
        const char *name = NULL, *type = program_value(p, &option_types[i], &name);
        const bool of_draft = i >= N_MODEL_TYPES;
        if (type != NULL && strcmp(type, "f16") != 0 && !(of_draft && drafts_elsewhere(p, list)))
            return refuse_type(&option_types[i], name, type, of_draft);
    }
    return true;
}

/* Refuses options of the program that would later end it, or its cache, without giving a reason.
 * The caches of listed GPUs may be kvant's, too. */
static bool check_program_options(const program *p, bool accel)
{
    const char *name = NULL, *attention = program_value(p, &option_attention, &name);
    if (program_is_off(attention)) {
        complain("exec: -fa off splits attention into several operations, but kvant computes only "
                 "flash attention, which is one");
        return hint("leave %s %s out", name, attention);
    }
    return accel || check_types(p, &(device_list){ .known = false });
}

/* Whether the options leave all layers out. The plug-in sees how many layers another -ngl leaves
 * out, and reports that. */
static bool leaves_all_out(const program *p, const gpu_plan *plan)
{
    const char *layers = program_value(p, &option_layers, NULL);
    return (program_keeps_cache(p) && !gpu_plan_drops_keeping(plan, p)) ||
           (layers != NULL && strcmp(layers, "0") == 0 && !plan->splits);
}

/* Warns when the options leave the whole cache uncompressed, because llama.cpp does not. */
static void warn_of_uncompressed(const program *p, const device_list *list, const gpu_plan *plan)
{
    const bool keeps = program_keeps_cache(p) && !gpu_plan_drops_keeping(plan, p);
    complain("exec: warning: with %s no layer has kvant's cache, so all of it stays uncompressed",
             keeps ? "-nkvo" : "-ngl 0");
    if (list->known && list->n_gpus == 0 && !plan->on_gpu)
        hint("leave it out: weights stay on the CPU in any case");
    else
        hint("leave it out%s", keeps ? ", and unset LLAMA_ARG_KV_OFFLOAD and "
                                       "LLAMA_ARG_NO_KV_OFFLOAD"
                                     : "");
}

/* Whether the program's folder has ggml's CUDA back end, as builds do whose back ends are files. */
static bool has_cuda(const program *p)
{
    char path[OS_MAX_PATH], real[OS_MAX_PATH];
    if (!os_find_program(p->argv[0], path, sizeof path) || !os_resolve(path, real, sizeof real))
        return false;
    const int folder = (int)(kvant_os_file_name(real) - real);
    return snprintf(path, sizeof path, "%.*s" KVANT_OS_LIBRARY("ggml-cuda"), folder, real) <
               (int)sizeof path &&
           kvant_os_exists(path);
}

/* The flags for the program. On a GPU --accel needs the device, too. */
static needed_flag *needed_flags(const program *p, bool accel, const device_list *list)
{
    const bool gpu = list->known ? list->n_gpus > 0 : has_cuda(p);
    return accel && !gpu ? needed_by_accel : needed;
}

/* Whether a flag must not be added. The plan already names the devices, and llama.cpp finds how
 * many layers fit them. The device KVANT alone would keep the weights from a GPU, which is of no
 * use if no layer's cache becomes kvant's. */
static bool is_useless(const needed_flag *flag, const program *p, const device_list *list,
                       const gpu_plan *plan)
{
    return (plan->on_gpu && flag->option != &option_attention) ||
           (flag->option == &option_device && gpu_is_left_out(list) && leaves_all_out(p, plan));
}

/* Copies words of the program, from the first to the one before the last; returns their number. */
static int copy_words(const program *p, const gpu_plan *plan, int first, int last, char **out)
{
    int n = 0;
    for (int i = first; i < last; i++)
        if ((out[n] = gpu_plan_word(plan, p, i)) != NULL)
            n++;
    return n;
}

/* The words to execute, with the flags at the end; NULL without memory. A program that another one
 * starts gets the flags right behind its name, or behind the command of `llama COMMAND`. The last
 * words may belong to the first program: find -exec llama-cli ... ';'. */
static char **build_arguments(const program *p, needed_flag *flags, const device_list *list,
                              const gpu_plan *plan)
{
    enum { MAX_ADDED = 2 * MAX_NEEDED + GPU_MAX_WORDS };
    char **out = calloc((size_t)(p->n_before + p->argc) + MAX_ADDED + 1, sizeof *out);
    if (out == NULL)
        return NULL;
    const int head = p->n_before == 0 ? p->argc : program_has_command(p) ? 2 : 1;
    int n = 0;
    while (n < p->n_before) {
        out[n] = p->before[n];
        n++;
    }
    n += copy_words(p, plan, 0, head, out + n);
    for (size_t i = 0; i < plan->n_words; i++)
        out[n++] = plan->words[i];
    for (size_t i = 0; flags != NULL && i < MAX_NEEDED && flags[i].option != NULL; i++)
        if (program_value(p, flags[i].option, NULL) == NULL &&
            !is_useless(&flags[i], p, list, plan)) {
            out[n++] = flags[i].name;
            out[n++] = flags[i].value;
        }
    copy_words(p, plan, head, p->argc, out + n);
    return out;
}

/* The user's choice of devices without kvant's; NULL: it is another choice, or none. */
static const char *other_device(const program *p, const device_list *list)
{
    const char *given = program_value(p, &option_device, NULL);
    return given == NULL || gpu_names_kvant(given, list) ? NULL : given;
}

/* Tells the user, before the program starts, what the flags cost. */
static void report_notes(const exec_options *o, const program *p, const device_list *list,
                         const gpu_plan *plan)
{
    if (o->accel) {
        if (!o->quiet)
            gpu_report_accel(p, list);
        return;
    }
    if (other_device(p, list) != NULL) {
        complain("exec: the device is set to '%s', so the cache will not be kvant's",
                 other_device(p, list));
        hint("leave --device and LLAMA_ARG_DEVICE out, or name " PLUGIN_DEVICE " there");
    }
    if (leaves_all_out(p, plan))
        warn_of_uncompressed(p, list, plan);
    else if (!o->quiet)
        gpu_report_unused(p, list, plan);
}

/* Variables that a llama.cpp program reads when another program starts it. Ollama switches flash
 * attention off for a device that it does not know, unless its own variable says otherwise. */
typedef struct variable {
    const char *name, *value;
} variable;
enum { N_VARIABLES = 4 };
typedef struct variable_set {
    variable list[N_VARIABLES];
    const char *must; /* what a program must do that calls llama.cpp's library itself */
} variable_set;
static const variable_set of_device = {
    .list = { { "LLAMA_ARG_DEVICE", PLUGIN_DEVICE },
              { "LLAMA_ARG_N_GPU_LAYERS", "99" },
              { "LLAMA_ARG_FLASH_ATTN", "on" },
              { "OLLAMA_FLASH_ATTENTION", "1" } },
    .must = "choose the device; without CUDA weights stay on the CPU then",
};
/* With GPUs for which kvant has no kernels, llama.cpp chooses the devices: weights are on the GPUs
 * then, and caches are kvant's. Only CUDA's GPUs have a device KVANT. */
static const variable_set of_others = {
    .list = { { "LLAMA_ARG_OVERRIDE_TENSOR", "none=CPU" },
              { "LLAMA_ARG_N_GPU_LAYERS", "99" },
              { "LLAMA_ARG_FLASH_ATTN", "on" },
              { "OLLAMA_FLASH_ATTENTION", "1" } },
    .must = "take all devices with all layers",
};
static const variable_set of_accel = {
    .list = { { "LLAMA_ARG_OVERRIDE_TENSOR", "none=CPU" },
              { "LLAMA_ARG_FLASH_ATTN", "on" },
              { "OLLAMA_FLASH_ATTENTION", "1" } },
    .must = "choose the device",
};

/* Sets these variables instead of adding flags, for a program that is not llama.cpp's. Variables
 * that the user has set stay. */
static bool set_variables(const variable_set *set)
{
    for (size_t i = 0; i < N_VARIABLES && set->list[i].name != NULL; i++)
        if (!os_set_default(set->list[i].name, set->list[i].value))
            return complain("exec: cannot set the environment: %s", strerror(errno));
    return true;
}

/* The word of the command line whose program has ggml linked in; NULL when no program is known
 * to. */
static const char *static_program(const program *p)
{
    char path[OS_MAX_PATH];
    for (int i = 0; i < p->argc; i++)
        if (os_find_program(p->argv[i], path, sizeof path) && program_has_ggml(path))
            return p->argv[i];
    return NULL;
}

static void report_static(const char *name)
{
    complain("exec: warning: '%s' has ggml linked in, so it cannot load kvant, and its cache stays "
             "uncompressed; kvant needs a build whose ggml is a shared library",
             kvant_os_file_name(name));
}

static void report_no_flags(const exec_options *o, const program *p, const variable_set *set)
{
    char variables[160] = "";
    if (o->quiet)
        return;
    for (size_t i = 0, n = 0; i < N_VARIABLES && set->list[i].name != NULL; i++)
        if (strncmp(set->list[i].name, "LLAMA_", 6) == 0 && n < sizeof variables)
            n += (size_t)snprintf(variables + n, sizeof variables - n, "%s%s=%s", n > 0 ? " " : "",
                                  set->list[i].name, set->list[i].value);
    complain("exec: the name '%s' does not begin with llama, so the program gets kvant's variables "
             "and no flags",
             kvant_os_file_name(p->argv[0]));
    hint(
        "a llama.cpp program that it starts reads %s; a program that calls the library itself must "
        "%s",
        variables, set->must);
}

static int exec_failed(const char *name)
{
    const int error = errno;
    complain("exec: cannot start %s: %s", name, strerror(error));
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
    p->protect_codec =
        p->protect_codec != NULL ? p->protect_codec : env_or_null(PLUGIN_ENV_PROTECT_CODEC);
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
    if (p->preset != NULL || p->settings != NULL || p->k != NULL || p->v != NULL ||
        p->protect != NOT_GIVEN || p->protect_codec != NULL || p->calibration != NULL) {
        complain(
            "exec: --accel keeps llama.cpp's own cache, so it takes no options that choose codecs");
        hint("choose the cache's types with the program's options: -ctk q8_0 -ctv q8_0");
        return EXIT_USAGE;
    }
    return plugin_set(&(kvant_scheme_params){ .k = NULL }, NULL, false) &&
                   os_set_variable(PLUGIN_ACCEL, "1")
               ? 0
               : EXIT_RUNTIME;
}

/* ggml reads one path: another back end that stands there is left to the plug-in, which loads it. A
 * path of the plug-in's comes from an exec around this one, or from a user who set it by hand. */
static bool keep_other_backend(const char *plugin)
{
    const char *other = env_or_null("GGML_BACKEND_PATH");
    return other == NULL || strcmp(kvant_os_file_name(other), kvant_os_file_name(plugin)) == 0 ||
           os_set_variable(PLUGIN_ENV_BACKEND, other);
}

/* Lets the plug-in save states as codes where no other llama.cpp can take them for its own rows. It
 * prints a line then. A user's choice stays. */
static bool choose_states(const exec_options *o)
{
    return o->accel || os_set_default(PLUGIN_ENV_STATES, "auto");
}

/* Sets the variables that load the plug-in and say how much it prints. 0 or an exit code. */
static int set_plugin(const exec_options *o)
{
    char path[OS_MAX_PATH];
    if (!plugin_path(path, sizeof path) || !plugin_limit_spinning())
        return EXIT_RUNTIME;
    if (keep_other_backend(path) && os_set_variable("GGML_BACKEND_PATH", path) &&
        (o->accel || os_set_variable(PLUGIN_ACCEL, NULL)) && choose_states(o) &&
        (!o->verbose || os_set_variable(PLUGIN_ENV_VERBOSE, "1")) &&
        (!o->quiet || os_set_variable(PLUGIN_ENV_QUIET, "1")))
        return 0;
    complain("exec: cannot set the environment: %s", strerror(errno));
    return EXIT_RUNTIME;
}

/* Whether exec watches the program, to say why its cache does not become kvant's. exec has already
 * said it if the user chose another device. A list or a text needs no cache. */
static bool is_watched(const exec_options *o, const program *p, const device_list *list,
                       bool is_llama)
{
    const char *quiet = getenv(PLUGIN_ENV_QUIET);
    if (quiet != NULL && strcmp(quiet, "1") == 0)
        return false;
    return !is_llama || !(program_only_prints(p) || (!o->accel && other_device(p, list) != NULL));
}

/* Returns only when the program could not be started. */
static int become(const exec_options *o, const program *p, bool is_llama)
{
    device_list list = { .known = false };
    gpu_plan plan = { .on_gpu = false };
    if (is_llama && !program_only_prints(p)) {
        devices_query(p, &list);
        if (!o->accel && !check_types(p, &list))
            return EXIT_USAGE;
        if (!o->accel)
            gpu_plan_make(p, &list, &plan);
        report_notes(o, p, &list, &plan);
    }
    bool watched = is_watched(o, p, &list, is_llama);
    if (!is_llama) {
        const char *linked = watched ? static_program(p) : NULL;
        const variable_set *set = o->accel                   ? &of_accel
                                  : devices_of_other_kinds() ? &of_others
                                                             : &of_device;
        if (!set_variables(set))
            return EXIT_RUNTIME;
        if (linked != NULL)
            report_static(linked);
        else
            report_no_flags(o, p, set);
        watched = watched && linked == NULL;
    }
    needed_flag *flags = is_llama ? needed_flags(p, o->accel, &list) : NULL;
    char **words = build_arguments(p, flags, &list, &plan);
    if (words == NULL) {
        complain("exec: out of memory");
        return EXIT_RUNTIME;
    }
    if (watched)
        watch_start(getenv("GGML_BACKEND_PATH"));
    os_become(words);
    const int code = exec_failed(words[0]);
    free(words);
    return code;
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
        hint("for example: kvant exec -- llama-server -m model.gguf");
        return EXIT_USAGE;
    }
    program p;
    const bool is_llama = program_find(argc - rest, argv + rest, &p);
    if (is_llama && !check_program_options(&p, o.accel))
        return EXIT_USAGE;
    o.cache.model = program_value(&p, &option_model, NULL);
    code = o.accel ? set_accel(&o) : set_codecs(&o);
    if (code != 0)
        return code;
    code = set_plugin(&o);
    return code != 0 ? code : become(&o, &p, is_llama);
}
