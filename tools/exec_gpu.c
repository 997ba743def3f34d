/* exec_gpu.c - see exec_gpu.h.
 *
 * The device KVANT holds a cache in the computer's memory and takes no weights. llama.cpp puts a
 * layer's cache where -ts puts the layer, and its weights where -ot says. So -ts gives all layers
 * to KVANT and the output to the GPU, and -ot brings the layers' weights to the GPU. */
#define _POSIX_C_SOURCE 200809L
#include "exec_gpu.h"

#include "command.h"
#include "gguf_file.h"
#include "plugin.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const program_option option_device = { { "-dev", "--device", NULL }, { "LLAMA_ARG_DEVICE", NULL } };
const program_option option_layers = { { "-ngl", "--gpu-layers", "--n-gpu-layers", NULL },
                                       { "LLAMA_ARG_N_GPU_LAYERS", NULL } };
const program_option option_model = { { "-m", "--model", NULL }, { "LLAMA_ARG_MODEL", NULL } };
static const program_option option_split = { { "-ts", "--tensor-split", NULL },
                                             { "LLAMA_ARG_TENSOR_SPLIT", NULL } };
static const program_option option_tensors = { { "-ot", "--override-tensor", NULL },
                                               { "LLAMA_ARG_OVERRIDE_TENSOR", NULL } };
static const program_option option_mode = { { "-sm", "--split-mode", NULL },
                                            { "LLAMA_ARG_SPLIT_MODE", NULL } };
static const program_option option_vision = {
    { "-mm", "--mmproj", "-mmu", "--mmproj-url", NULL },
    { "LLAMA_ARG_MMPROJ", "LLAMA_ARG_MMPROJ_URL", NULL }
};
static const program_option option_vision_device = { { "-mmdev", "--mmproj-device", NULL },
                                                     { "MTMD_BACKEND_DEVICE", NULL } };
static const program_option option_type_k = { { "-ctk", "--cache-type-k", NULL },
                                              { "LLAMA_ARG_CACHE_TYPE_K", NULL } };
static const program_option option_type_v = { { "-ctv", "--cache-type-v", NULL },
                                              { "LLAMA_ARG_CACHE_TYPE_V", NULL } };

/* Words that grow; what does not fit is cut. */
typedef struct words {
    char text[8 * GGUF_MAX_LAYERS];
    size_t n;
} words;

__attribute__((format(printf, 2, 3))) static void add(words *w, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(w->text + w->n, sizeof w->text - w->n, format, args);
    va_end(args);
    if (n > 0)
        w->n = w->n + (size_t)n < sizeof w->text ? w->n + (size_t)n : sizeof w->text - 1;
}

bool gpu_is_left_out(const device_list *list)
{
    return list->n_gpus == 0 && list->n_others > 0;
}

bool gpu_names_kvant(const char *devices)
{
    return strstr(devices, PLUGIN_DEVICE) != NULL;
}

/* Which layers' weights go to which GPU. */
typedef struct gpu_plan {
    uint32_t n_layers;            /* of the model; 0: not known */
    uint32_t n_placed;            /* the last ones of them, on GPUs */
    uint32_t n_wanted;            /* that -ngl asks for */
    uint32_t on[MAX_DEVICES];     /* layers of each GPU */
} gpu_plan;

/* -ngl counts the output as a layer. */
static uint32_t wanted_layers(const program *p, uint32_t n_layers)
{
    const char *given = program_value(p, &option_layers, NULL);
    char *end = NULL;
    const unsigned long n = given != NULL ? strtoul(given, &end, 10) : 0;
    if (given == NULL || end == given || *end != 0 || given[0] == '-' || n > n_layers)
        return n_layers;
    return n > 0 ? (uint32_t)n - 1 : n_layers; /* with 0 no layer's cache would be kvant's */
}

/* As many layers as a GPU's free memory holds. A fifth stays free for the tensors of a graph. */
static uint32_t room(const device *gpu, uint64_t bytes, uint32_t n_layers)
{
    if (gpu->free_mib == 0)
        return n_layers;
    const double layer = (double)bytes / (n_layers + 1); /* the output counts as one more */
    const double fits = (double)gpu->free_mib * 1048576 * 0.8 / layer - 1;
    return fits >= n_layers ? n_layers : fits > 0 ? (uint32_t)fits : 0;
}

/* The first GPUs are filled first, so that one is enough where the model fits it. */
static gpu_plan make_plan(const program *p, const device_list *list)
{
    const char *model = program_value(p, &option_model, NULL);
    gpu_plan out = { .n_layers = 0 };
    gguf_size size;
    if (model == NULL || !gguf_read_size(model, &size))
        return out;
    out.n_layers = size.n_layers;
    out.n_wanted = wanted_layers(p, size.n_layers);
    for (size_t i = 0; i < list->n_others && out.n_placed < out.n_wanted; i++) {
        const uint32_t left = out.n_wanted - out.n_placed;
        const uint32_t fit = room(&list->others[i], size.bytes, size.n_layers);
        out.on[i] = fit < left ? fit : left;
        out.n_placed += out.on[i];
    }
    return out;
}

/* OpenCL's buffers have another name than its device. */
static const char *buffer_name(const device *gpu)
{
    return strcmp(gpu->name, "GPUOpenCL") == 0 ? "OpenCL" : gpu->name;
}

/* 'blk\.(28|29)\.=Vulkan0', or 'blk\..*=Vulkan0' for all layers. */
static void add_tensors(words *w, const gpu_plan *plan, const device_list *list, char separator)
{
    uint32_t layer = plan->n_layers - plan->n_placed;
    bool first = true;
    for (size_t i = 0; i < list->n_others; i++) {
        if (plan->n_layers != 0 && plan->on[i] == 0)
            continue;
        if (!first)
            add(w, "%c", separator);
        first = false;
        if (plan->on[i] == plan->n_layers) {
            add(w, "blk\\..*=%s", buffer_name(&list->others[i]));
            return;
        }
        for (uint32_t n = 0; n < plan->on[i]; n++)
            add(w, "%s%u", n == 0 ? "blk\\.(" : "|", (unsigned)layer++);
        add(w, ")\\.=%s", buffer_name(&list->others[i]));
    }
}

static void add_flags(words *w, const program *p, const device_list *list, const gpu_plan *plan)
{
    const char between = program_is_bench(p) ? '/' : ',';
    const char *mode = program_value(p, &option_mode, NULL);
    size_t n = 1; /* GPUs that are needed */
    for (size_t i = 1; i < list->n_others; i++)
        n = plan->on[i] > 0 ? i + 1 : n;
    add(w, "--device " PLUGIN_DEVICE);
    for (size_t i = 0; i < n; i++)
        add(w, "%c%s", between, list->others[i].name);
    if (plan->n_layers == 0)
        add(w, " -ts N-0.5%c1.5", between);
    else
        add(w, " -ts %u.5%c1.5", (unsigned)plan->n_layers - 1, between);
    for (size_t i = 1; i < n; i++)
        add(w, "%c0", between);
    add(w, " -ot '");
    add_tensors(w, plan, list, program_is_bench(p) ? ';' : ',');
    add(w, "'");
    if (program_value(p, &option_layers, NULL) != NULL)
        add(w, " -ngl 99");
    if (mode != NULL && strcmp(mode, "layer") != 0)
        add(w, " -sm layer");
    /* A model that sees or hears computes on the first device, unless told otherwise. */
    if (program_value(p, &option_vision, NULL) != NULL &&
        program_value(p, &option_vision_device, NULL) == NULL)
        add(w, " -mmdev %s", list->others[0].name);
}

void gpu_hint_flags(const program *p, const device_list *list)
{
    const gpu_plan plan = make_plan(p, list);
    words w = { .n = 0 };
    if (plan.n_layers != 0 && plan.n_placed == 0) {
        hint("%s has not enough free memory for weights of this model", list->others[0].name);
        return;
    }
    if (plan.n_placed < plan.n_layers)
        add(&w, "weights of %u of %u layers on the GPU%s", (unsigned)plan.n_placed,
            (unsigned)plan.n_layers,
            plan.n_placed < plan.n_wanted ? " (more do not fit its free memory)" : "");
    else
        add(&w, "weights on the GPU");
    add(&w, ", the compressed cache in the computer's memory: ");
    add_flags(&w, p, list, &plan);
    if (plan.n_layers == 0)
        add(&w, ", where N is the model's number of layers");
    hint("%s", w.text);
}

static void add_names(words *w, const device *devices, size_t n)
{
    for (size_t i = 0; i < n; i++)
        add(w, "%s%s (%s)", w->n > 0 ? ", " : "", devices[i].name, devices[i].description);
}

/* kvant works on CUDA's GPUs, and --device KVANT is the first of them alone. */
static void say_other_gpus(const program *p, const device_list *list)
{
    const char between = program_is_bench(p) ? '/' : ',';
    words unused = { .n = 0 }, flag = { .n = 0 };
    add_names(&unused, list->gpus + 1, list->n_gpus - 1);
    add_names(&unused, list->others, list->n_others);
    if (unused.n == 0)
        return;
    complain("exec: --device " PLUGIN_DEVICE " is %s (%s) alone. Not used: %s", list->gpus[0].name,
             list->gpus[0].description, unused.text);
    for (size_t i = 0; i < list->n_gpus; i++)
        add(&flag, "%c%s", i == 0 ? ' ' : between, list->gpus[i].name);
    if (list->n_gpus > 1)
        hint("--device%s spreads the layers over all of kvant's GPUs", flag.text);
    else
        hint("--device%s%c%s uses it, too: layers there keep llama.cpp's own cache", flag.text,
             between, list->others[0].name);
}

void gpu_say_unused(const program *p, const device_list *list, bool added)
{
    const char *given = program_value(p, &option_device, NULL);
    const char *mode = program_value(p, &option_mode, NULL);
    const bool one_gpu = mode != NULL && strcmp(mode, "none") == 0;
    words others = { .n = 0 };
    if (list->n_gpus > 0 && added && !one_gpu)
        say_other_gpus(p, list);
    if (!gpu_is_left_out(list) || (given != NULL && !gpu_names_kvant(given)))
        return;
    add_names(&others, list->others, list->n_others);
    if (given == NULL || strcmp(given, PLUGIN_DEVICE) == 0)
        complain("exec: weights stay on the CPU, because --device " PLUGIN_DEVICE
                 " holds the cache alone. Not used: %s", others.text);
    else if (program_value(p, &option_split, NULL) == NULL ||
             program_value(p, &option_tensors, NULL) == NULL)
        complain("exec: weights stay on the CPU where the cache is kvant's, and the cache stays "
                 "llama.cpp's where weights are on a GPU: --device %s without -ts and -ot", given);
    else
        return;
    gpu_hint_flags(p, list);
}

/* kvant's attention on CUDA's GPUs reads two types, of keys and values alike. */
static void say_accel_on_cuda(const program *p)
{
    const char *k = program_value(p, &option_type_k, NULL);
    const char *v = program_value(p, &option_type_v, NULL);
    const bool alike = k != NULL && v != NULL && strcmp(k, v) == 0;
    if (alike && (strcmp(k, "q8_0") == 0 || strcmp(k, "q4_0") == 0))
        say_line("kvant: ", "attention of decoded tokens on llama.cpp's own cache of %s, on the "
                 "GPU; llama.cpp computes prompts", k);
    else
        complain("exec: --accel computes nothing on a GPU here: there it reads caches of -ctk q8_0 "
                 "-ctv q8_0, or -ctk q4_0 -ctv q4_0");
}

void gpu_say_accel(const program *p, const device_list *list)
{
    const char *layers = program_value(p, &option_layers, NULL);
    const char *devices = program_value(p, &option_device, NULL);
    const bool on_cpu = (layers != NULL && strcmp(layers, "0") == 0) ||
                        (devices != NULL && strcmp(devices, "none") == 0);
    words others = { .n = 0 };
    if (on_cpu || (list->n_gpus == 0 && list->n_others == 0)) {
        say_line("kvant: ", "attention on llama.cpp's own cache, of the types that -ctk and -ctv "
                 "name: no codec, no calibration");
    } else if (list->n_gpus > 0) {
        say_accel_on_cuda(p);
    } else {
        add_names(&others, list->others, list->n_others);
        complain("exec: --accel computes nothing for layers on a GPU of another kind than CUDA's: "
                 "llama.cpp computes their attention on %s. kvant's is that of layers on the CPU",
                 others.text);
    }
}
