/* exec_gpu.c - see exec_gpu.h. */
#define _POSIX_C_SOURCE 200809L
#include "exec_gpu.h"

#include "command.h"
#include "plugin.h"

#include <string.h>

static const program_option option_type_k = { { "-ctk", "--cache-type-k", NULL },
                                              { "LLAMA_ARG_CACHE_TYPE_K", NULL } };
static const program_option option_mode = { { "-sm", "--split-mode", NULL },
                                            { "LLAMA_ARG_SPLIT_MODE", NULL } };
static const program_option option_type_v = { { "-ctv", "--cache-type-v", NULL },
                                              { "LLAMA_ARG_CACHE_TYPE_V", NULL } };

enum { WORDS = 4096 }; /* bytes of a part of a message */

static void add_names(char *words, const device *devices, size_t n)
{
    for (size_t i = 0; i < n; i++)
        gpu_add(words, WORDS, "%s%s (%s)", words[0] != 0 ? ", " : "", devices[i].name,
                devices[i].description);
}

/* kvant works on CUDA's GPUs, and --device KVANT is the first of them alone. */
static void report_other_gpus(const program *p, const device_list *list)
{
    const char between = program_is_bench(p) ? '/' : ',';
    char unused[WORDS] = "", flag[WORDS] = "";
    add_names(unused, list->gpus + 1, list->n_gpus - 1);
    add_names(unused, list->others, list->n_others);
    if (unused[0] == 0)
        return;
    complain("exec: --device " PLUGIN_DEVICE " is only %s (%s). Not used: %s", list->gpus[0].name,
             list->gpus[0].description, unused);
    for (size_t i = 0; i < list->n_gpus; i++)
        gpu_add(flag, WORDS, "%c%s", i == 0 ? ' ' : between, list->gpus[i].name);
    if (list->n_gpus > 1)
        hint("--device%s spreads the layers over all of kvant's GPUs", flag);
    else
        hint("--device%s%c%s uses it, too: layers there keep llama.cpp's own cache", flag, between,
             list->others[0].name);
}

/* Which device holds the weights and which the cache. */
static void report_placed(const program *p, const device_list *list, const gpu_plan *plan)
{
    char gpus[WORDS] = "", part[WORDS] = "";
    const char *dropped = gpu_plan_drops_keeping(plan, p)
                              ? "; -nkvo is left out, because it would take the cache from kvant"
                              : "";
    if (plan->n_words == 0)
        return; /* the user chose the devices */
    for (size_t i = 0; i < plan->n_gpus; i++)
        if (!plan->splits || i == 0 || plan->on[i] > 0)
            add_names(gpus, &list->others[i], 1);
    if (plan->keeps_output) {
        report_line("kvant: ",
                    "weights and the compressed cache in the computer's memory, because -ngl is "
                    "0; %s computes long batches%s. With --device " PLUGIN_DEVICE
                    " the GPU is not used",
                    gpus, dropped);
        return;
    }
    if (plan->splits)
        gpu_add(part, WORDS, " of %u of %u layers", (unsigned)plan->n_placed,
                (unsigned)plan->n_layers);
    report_line(
        "kvant: ",
        "weights%s on %s%s, the compressed cache in the computer's memory, where kvant "
        "computes attention%s. With --device " PLUGIN_DEVICE " the weights stay there, too",
        part, gpus,
        plan->n_placed < plan->n_wanted && plan->splits ? " (more do not fit its free memory)" : "",
        dropped);
}

void gpu_report_unused(const program *p, const device_list *list, const gpu_plan *plan)
{
    const char *given = program_value(p, &option_device, NULL);
    const char *mode = program_value(p, &option_mode, NULL);
    const bool one_gpu = mode != NULL && strcmp(mode, "none") == 0;
    char others[WORDS] = "";
    if (list->n_gpus > 0 && given == NULL && !one_gpu)
        report_other_gpus(p, list);
    if (plan->on_gpu)
        report_placed(p, list, plan);
    if (plan->on_gpu || !gpu_is_left_out(list) ||
        (given != NULL && strcmp(given, PLUGIN_DEVICE) != 0))
        return;
    add_names(others, list->others, list->n_others);
    if (given == NULL) {
        complain("exec: weights stay on the CPU, because the plug-in does not keep the caches of "
                 "the program's GPUs. Not used: %s",
                 others);
        hint("unset KVANT_GPU if it is 0");
    } else {
        complain("exec: weights stay on the CPU, because --device " PLUGIN_DEVICE
                 " holds only the cache. Not used: %s",
                 others);
        hint("leave --device and LLAMA_ARG_DEVICE out");
    }
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
    char others[WORDS] = "";
    if (on_cpu || (list->n_gpus == 0 && list->n_others == 0)) {
        report_line("kvant: ", "attention on llama.cpp's own cache, of the types that "
                               "-ctk and -ctv name: no codec, no calibration");
    } else if (list->n_gpus > 0) {
        report_accel_on_cuda(p);
    } else {
        add_names(others, list->others, list->n_others);
        complain("exec: --accel computes nothing for layers on a GPU that is not CUDA's: llama.cpp "
                 "computes their attention on %s. kvant computes attention of layers on the CPU",
                 others);
    }
}
