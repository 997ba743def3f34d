/* exec_offload.c - see exec_offload.h. */
#define _POSIX_C_SOURCE 200809L
#include "exec_offload.h"

#include "command.h"
#include "gguf_file.h"
#include "plugin.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const program_option option_device = { { "-dev", "--device", NULL }, { "LLAMA_ARG_DEVICE", NULL } };
const program_option option_layers = { { "-ngl", "--gpu-layers", "--n-gpu-layers", NULL },
                                       { "LLAMA_ARG_N_GPU_LAYERS", NULL } };
const program_option option_model = { { "-m", "--model", NULL }, { "LLAMA_ARG_MODEL", NULL } };
static const program_option option_no_offload = { { "-nkvo", "--no-kv-offload", NULL }, { NULL } };
static const program_option option_vision = { { "-mm", "--mmproj", NULL },
                                              { "LLAMA_ARG_MMPROJ", NULL } };
static const program_option option_draft = { { "-md", "--model-draft", "--spec-draft-model", NULL },
                                             { "LLAMA_ARG_SPEC_DRAFT_MODEL",
                                               "LLAMA_ARG_MODEL_DRAFT", NULL } };
/* The user's own choice of where weights are. exec adds no split to it. */
static const program_option option_places[] = {
    { { "-ts", "--tensor-split", NULL }, { "LLAMA_ARG_TENSOR_SPLIT", NULL } },
    { { "-ot", "--override-tensor", NULL }, { "LLAMA_ARG_OVERRIDE_TENSOR", NULL } },
    { { "-sm", "--split-mode", NULL }, { "LLAMA_ARG_SPLIT_MODE", NULL } },
    { { "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", NULL },
      { "LLAMA_ARG_CPU_MOE", "LLAMA_ARG_N_CPU_MOE", NULL } },
    { { "-ncffn", "--n-cpu-ffn", NULL }, { "LLAMA_ARG_N_CPU_FFN", NULL } },
    { { "-fitt", "--fit-target", "-fitc", "--fit-ctx", NULL }, { NULL } },
};

bool gpu_is_left_out(const device_list *list)
{
    return list->n_gpus == 0 && list->n_others > 0 && (list->has_kvant || !list->has_cuda);
}

/* The end of a device's name, where its number begins. */
static size_t name_bytes(const device *d)
{
    size_t n = 0;
    while (d->name[n] != 0 && !isdigit((unsigned char)d->name[n]))
        n++;
    return n;
}

/* Two back ends can list the same card, as Vulkan0 and as ROCm0. One of them is enough. */
static size_t count_gpus(const device_list *list)
{
    const size_t bytes = name_bytes(&list->others[0]);
    size_t n = 0;
    while (n < list->n_others && name_bytes(&list->others[n]) == bytes &&
           strncmp(list->others[n].name, list->others[0].name, bytes) == 0)
        n++;
    return n;
}

/* Whether a list such as KVANT,Vulkan0 has the name. */
static bool has_name(const char *devices, const char *name)
{
    const size_t n = strlen(name);
    for (const char *at = devices; at != NULL; at = strpbrk(at, ",/;")) {
        at += strspn(at, ",/;");
        if (strncmp(at, name, n) == 0 && strchr(",/;", at[n]) != NULL)
            return true;
    }
    return false;
}

bool gpu_names_kvant(const char *devices, const device_list *list)
{
    bool names = strstr(devices, PLUGIN_DEVICE) != NULL;
    for (size_t i = 0; i < list->n_others && !names; i++)
        names = list->others[i].keeps_caches && has_name(devices, list->others[i].name);
    return names;
}

static int count_words(const program *p, const program_option *option)
{
    int n = 0;
    for (int i = 1; i < p->argc; i++)
        n += program_word_is(p->argv[i], option);
    return n;
}

/* Reads how many layers are wanted on GPUs. -ngl counts the output as a layer. False for a list of
 * numbers, for which llama-bench runs several times. */
static bool read_wanted(const program *p, gpu_plan *plan)
{
    const char *given = program_value(p, &option_layers, NULL);
    char *end = NULL;
    const unsigned long n = given != NULL ? strtoul(given, &end, 10) : 0;
    plan->n_wanted = plan->n_layers;
    if (given == NULL || end == given || given[0] == '-')
        return true;
    if (*end == 0 && n <= plan->n_layers) {
        plan->keeps_output = n == 0;
        plan->n_wanted = n > 0 ? (uint32_t)n - 1 : 0;
    }
    return *end == 0 && count_words(p, &option_layers) <= 1;
}

/* How many layers a GPU's free memory holds. Other models take some bytes of it, and a fifth stays
 * free for the tensors of a graph. */
static uint32_t room(const device *gpu, uint64_t taken, const gguf_size *model)
{
    if (gpu->free_mib == 0)
        return model->n_layers;
    const double layer = (double)model->bytes / (model->n_layers + 1); /* the output is one more */
    const double left = (double)gpu->free_mib * 1048576 * 0.8 - (double)taken;
    const double fits = left / layer - 1;
    return fits >= model->n_layers ? model->n_layers : fits > 0 ? (uint32_t)fits : 0;
}

/* Bytes of the vision model and of the draft model, which the first GPU holds. */
static uint64_t bytes_of_others(const program *p)
{
    const char *draft = program_value(p, &option_draft, NULL);
    const char *vision = program_value(p, &option_vision, NULL);
    return (draft != NULL ? gguf_bytes(draft) : 0) + (vision != NULL ? gguf_bytes(vision) : 0);
}

/* The first GPUs are filled first, so that one is enough where the model fits it. */
static void place_layers(const program *p, const device_list *list, const gguf_size *size,
                         gpu_plan *plan)
{
    for (size_t i = 0; i < plan->n_gpus && plan->n_placed < plan->n_wanted; i++) {
        const uint32_t left = plan->n_wanted - plan->n_placed;
        const uint32_t fit = room(&list->others[i], i == 0 ? bytes_of_others(p) : 0, size);
        plan->on[i] = fit < left ? fit : left;
        plan->n_placed += plan->on[i];
    }
}

/* Whether weights of layers stay on the CPU, and how many is known. */
static bool needs_split(const program *p, const device_list *list, gpu_plan *plan)
{
    const char *model = program_value(p, &option_model, NULL);
    gguf_size size = { .n_layers = 0 };
    for (size_t i = 0; i < sizeof option_places / sizeof *option_places; i++)
        if (program_value(p, &option_places[i], NULL) != NULL)
            return false;
    if (model == NULL || !gguf_read_size(model, &size) || count_words(p, &option_model) > 1)
        return false;
    plan->n_layers = size.n_layers;
    if (!read_wanted(p, plan))
        return false;
    place_layers(p, list, &size, plan);
    return plan->n_placed < plan->n_layers;
}

void gpu_add(char *text, size_t bytes, const char *format, ...)
{
    const size_t n = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + n, bytes - n, format, args);
    va_end(args);
}

static void add_words(gpu_plan *plan, const char *flag, char *value)
{
    plan->words[plan->n_words++] = program_argument(flag);
    plan->words[plan->n_words++] = value;
}

/* How many of the GPUs get layers; one at least, for the output or for long batches. */
static size_t used_gpus(const gpu_plan *plan)
{
    size_t n = 1;
    for (size_t i = 1; i < plan->n_gpus; i++)
        n = !plan->splits || plan->on[i] > 0 ? i + 1 : n;
    return n;
}

/* Each device's number of layers. llama.cpp gives layers to devices in their order, the output
 * last. Half a layer more or less keeps the borders off whole layers. */
static void write_shares(gpu_plan *plan, char between, size_t n)
{
    const uint32_t first = plan->n_layers - plan->n_placed;
    if (plan->keeps_output)
        gpu_add(plan->shares, sizeof plan->shares, "1%c0", between);
    else
        gpu_add(plan->shares, sizeof plan->shares, "%u.5", (unsigned)first - 1);
    for (size_t i = 0; i < n && !plan->keeps_output; i++)
        gpu_add(plan->shares, sizeof plan->shares, "%c%u%s", between,
                (unsigned)plan->on[i] + (i + 1 == n), i + 1 == n ? ".5" : "");
}

void gpu_plan_make(const program *p, const device_list *list, gpu_plan *plan)
{
    static char all[] = "99";
    const char *given = program_value(p, &option_device, NULL);
    const char between = program_is_bench(p) ? '/' : ',';
    *plan = (gpu_plan){ .on_gpu = false };
    if (!gpu_is_left_out(list) || !list->others[0].keeps_caches)
        return;
    plan->n_gpus = count_gpus(list);
    plan->on_gpu = given == NULL || !has_name(given, PLUGIN_DEVICE);
    if (given != NULL)
        return;
    plan->splits = needs_split(p, list, plan);
    const size_t n = used_gpus(plan);
    if (plan->splits)
        gpu_add(plan->devices, sizeof plan->devices, PLUGIN_DEVICE);
    for (size_t i = 0; i < n; i++)
        gpu_add(plan->devices, sizeof plan->devices, "%.*s%s", i > 0 || plan->splits, &between,
                list->others[i].name);
    add_words(plan, "--device", plan->devices);
    if (!plan->splits)
        return;
    write_shares(plan, between, n);
    add_words(plan, "-ts", plan->shares);
    if (count_words(p, &option_layers) == 0) /* a word -ngl gets its value in gpu_plan_word() */
        add_words(plan, "-ngl", all);
}

char *gpu_plan_word(const gpu_plan *plan, const program *p, int i)
{
    static char all[] = "99", no[] = "0";
    const char *before = i > 0 ? p->argv[i - 1] : "";
    if (plan->splits && program_word_is(before, &option_layers))
        return all;
    if (!plan->on_gpu)
        return p->argv[i];
    if (program_is_bench(p)) /* its -nkvo has a value */
        return program_word_is(before, &option_no_offload) && strchr(p->argv[i], ',') == NULL
                   ? no
                   : p->argv[i];
    return i > 0 && program_word_is(p->argv[i], &option_no_offload) ? NULL : p->argv[i];
}

bool gpu_plan_drops_keeping(const gpu_plan *plan, const program *p)
{
    return plan->on_gpu && program_keeps_cache(p) && count_words(p, &option_no_offload) > 0 &&
           (!program_is_bench(p) ||
            strchr(program_value(p, &option_no_offload, NULL), ',') == NULL);
}
