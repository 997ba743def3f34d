/* exec_gpu.c - see exec_gpu.h. */
#define _POSIX_C_SOURCE 200809L
#include "exec_gpu.h"

#include "command.h"
#include "gguf_file.h"
#include "plugin.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

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

bool gpu_names_kvant(const char *devices)
{
    return strstr(devices, PLUGIN_DEVICE) != NULL;
}

/* How many layers' weights are on GPUs, where these are not all. */
static void add_part(words *w, const gpu_plan *plan)
{
    if (plan->n_placed < plan->n_layers)
        add(w, " of %u of %u layers", (unsigned)plan->n_placed, (unsigned)plan->n_layers);
}

static const char *part_reason(const gpu_plan *plan)
{
    return plan->n_placed < plan->n_wanted ? " (more do not fit its free memory)" : "";
}

/* The plan's words as they are typed, and what exec would change in the user's own. */
static void add_flags(words *w, const program *p, const device_list *list, const gpu_plan *plan)
{
    const char *mode = gpu_user_mode(p), *tensors = gpu_user_tensors(p), *name = "";
    for (size_t i = 0; i < plan->n_words; i += 2) {
        if (strcmp(plan->words[i], "-ot") != 0)
            add(w, "%s%s %s", i > 0 ? " " : "", plan->words[i], plan->words[i + 1]);
        else if (tensors == NULL)
            add(w, " -ot '%s'", plan->words[i + 1]);
        else /* the first pattern that matches counts */
            add(w, " -ot '%s%c%s'", tensors, program_is_bench(p) ? ';' : ',', plan->words[i + 1]);
    }
    if (program_value(p, &option_layers, &name) != NULL && name[0] == '-')
        add(w, " -ngl 99");
    if (mode != NULL && strcmp(mode, "layer") != 0)
        add(w, " -sm layer");
    if (gpu_has_vision(p))
        add(w, " -mmdev %s", list->others[0].name);
}

void gpu_hint_flags(const program *p, const device_list *list, const gpu_plan *plan)
{
    words w = { .n = 0 };
    if (plan->n_layers != 0 && plan->n_placed == 0 && plan->n_wanted > 0) {
        hint("free memory of %s: no layer of this model fits into it now", list->others[0].name);
        return;
    }
    add(&w, "weights");
    add_part(&w, plan);
    add(&w, " on the GPU%s, the compressed cache in the computer's memory: ", part_reason(plan));
    add_flags(&w, p, list, plan);
    if (plan->n_layers == 0 && !plan->keeps_output)
        add(&w, ", where N is the model's number of layers");
    if (program_keeps_cache(p))
        add(&w, ", without -nkvo and LLAMA_ARG_NO_KV_OFFLOAD");
    hint("%s", w.text);
}

static void add_names(words *w, const device *devices, size_t n)
{
    for (size_t i = 0; i < n; i++)
        add(w, "%s%s (%s)", w->n > 0 ? ", " : "", devices[i].name, devices[i].description);
}

/* kvant works on CUDA's GPUs, and --device KVANT is the first of them alone. */
static void report_other_gpus(const program *p, const device_list *list)
{
    const char between = program_is_bench(p) ? '/' : ',';
    words unused = { .n = 0 }, flag = { .n = 0 };
    add_names(&unused, list->gpus + 1, list->n_gpus - 1);
    add_names(&unused, list->others, list->n_others);
    if (unused.n == 0)
        return;
    complain("exec: --device " PLUGIN_DEVICE " is only %s (%s). Not used: %s", list->gpus[0].name,
             list->gpus[0].description, unused.text);
    for (size_t i = 0; i < list->n_gpus; i++)
        add(&flag, "%c%s", i == 0 ? ' ' : between, list->gpus[i].name);
    if (list->n_gpus > 1)
        hint("--device%s spreads the layers over all of kvant's GPUs", flag.text);
    else
        hint("--device%s%c%s uses it, too: layers there keep llama.cpp's own cache", flag.text,
             between, list->others[0].name);
}

/* Which device holds the weights and which the cache. */
static void report_placed(const program *p, const device_list *list, const gpu_plan *plan)
{
    words w = { .n = 0 }, gpus = { .n = 0 };
    for (size_t i = 0; i < plan->n_gpus; i++)
        if (plan->on[i] > 0 || (i == 0 && plan->n_placed == 0))
            add_names(&gpus, &list->others[i], 1);
    if (plan->keeps_output) {
        add(&w,
            "weights and the compressed cache in the computer's memory, because -ngl is 0; %s "
            "computes long batches",
            gpus.text);
    } else {
        add(&w, plan->n_wanted == 0 ? "the output's weights" : "weights");
        if (plan->n_wanted > 0)
            add_part(&w, plan);
        add(&w,
            " on %s%s, the compressed cache in the computer's memory, where kvant computes "
            "attention",
            gpus.text, part_reason(plan));
    }
    if (program_keeps_cache(p))
        add(&w, "; -nkvo is left out, because it would take the cache from kvant");
    if (gpu_has_draft(p))
        add(&w, "; the draft model and its f16 cache on %s", list->others[0].name);
    report_line("kvant: ", "%s. With --device " PLUGIN_DEVICE " %s", w.text,
                plan->keeps_output ? "the GPU is not used" : "the weights stay there, too");
}

void gpu_report_unused(const program *p, const device_list *list, const gpu_plan *plan)
{
    const char *given = program_value(p, &option_device, NULL), *mode = gpu_user_mode(p);
    const bool one_gpu = mode != NULL && strcmp(mode, "none") == 0;
    words others = { .n = 0 };
    if (list->n_gpus > 0 && given == NULL && !one_gpu)
        report_other_gpus(p, list);
    if (plan->adds)
        report_placed(p, list, plan);
    if (plan->adds || !gpu_is_left_out(list) || (given != NULL && !gpu_names_kvant(given)))
        return;
    add_names(&others, list->others, list->n_others);
    if (given == NULL)
        complain("exec: weights stay on the CPU: %s. Not used: %s", plan->problem, others.text);
    else if (strcmp(given, PLUGIN_DEVICE) == 0)
        complain("exec: weights stay on the CPU, because --device " PLUGIN_DEVICE
                 " holds only the cache. Not used: %s",
                 others.text);
    else if (gpu_user_split(p) == NULL || gpu_user_tensors(p) == NULL)
        complain("exec: --device %s without -ts and -ot: weights stay on the CPU in layers with "
                 "kvant's cache, and layers with weights on a GPU keep llama.cpp's cache",
                 given);
    else
        return;
    gpu_hint_flags(p, list, plan);
}

/* kvant's attention on CUDA's GPUs reads two types, of keys and values alike. */
static void report_accel_on_cuda(const program *p)
{
    const char *k = program_value(p, &option_type_k, NULL);
    const char *v = program_value(p, &option_type_v, NULL);
    const bool alike = k != NULL && v != NULL && strcmp(k, v) == 0;
    if (alike && (strcmp(k, "q8_0") == 0 || strcmp(k, "q4_0") == 0))
        report_line("kvant: ",
                    "attention of decoded tokens on llama.cpp's own cache of %s, on "
                    "the GPU; llama.cpp computes prompts",
                    k);
    else
        complain("exec: --accel computes nothing on a GPU here: on a GPU it reads only caches of "
                 "-ctk q8_0 -ctv q8_0, or -ctk q4_0 -ctv q4_0");
}

void gpu_report_accel(const program *p, const device_list *list)
{
    const char *layers = program_value(p, &option_layers, NULL);
    const char *devices = program_value(p, &option_device, NULL);
    const bool on_cpu = (layers != NULL && strcmp(layers, "0") == 0) ||
                        (devices != NULL && strcmp(devices, "none") == 0);
    words others = { .n = 0 };
    if (on_cpu || (list->n_gpus == 0 && list->n_others == 0)) {
        report_line("kvant: ", "attention on llama.cpp's own cache, of the types that "
                               "-ctk and -ctv name: no codec, no calibration");
    } else if (list->n_gpus > 0) {
        report_accel_on_cuda(p);
    } else {
        add_names(&others, list->others, list->n_others);
        complain("exec: --accel computes nothing for layers on a GPU that is not CUDA's: llama.cpp "
                 "computes their attention on %s. kvant computes attention of layers on the CPU",
                 others.text);
    }
}
