/* exec_offload.c - see exec_offload.h.
 *
 * The device KVANT holds a cache in the computer's memory and takes no weights. llama.cpp puts a
 * layer's cache where -ts puts the layer, and its weights where -ot says. So -ts gives all layers
 * to KVANT and the output to the GPU, and -ot brings the layers' weights to the GPU. */
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
static const program_option option_split = { { "-ts", "--tensor-split", NULL },
                                             { "LLAMA_ARG_TENSOR_SPLIT", NULL } };
static const program_option option_tensors = { { "-ot", "--override-tensor", NULL },
                                               { "LLAMA_ARG_OVERRIDE_TENSOR", NULL } };
static const program_option option_mode = { { "-sm", "--split-mode", NULL },
                                            { "LLAMA_ARG_SPLIT_MODE", NULL } };
static const program_option option_vision = { { "-mm", "--mmproj", "-mmu", "--mmproj-url", NULL },
                                              { "LLAMA_ARG_MMPROJ", "LLAMA_ARG_MMPROJ_URL",
                                                NULL } };
static const program_option option_vision_device = {
    { "-mmdev", "--mmproj-device", "--no-mmproj-offload", NULL },
    { "MTMD_BACKEND_DEVICE", "LLAMA_ARG_MMPROJ_OFFLOAD", NULL }
};
static const program_option option_draft = { { "-md", "--model-draft", "--spec-draft-model", NULL },
                                             { "LLAMA_ARG_SPEC_DRAFT_MODEL",
                                               "LLAMA_ARG_MODEL_DRAFT", NULL } };
static const program_option option_draft_repository = {
    { "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf", NULL },
    { "LLAMA_ARG_SPEC_DRAFT_HF_REPO", "LLAMA_ARG_HFD_REPO", NULL }
};
static const program_option option_draft_device = {
    { "-devd", "--device-draft", "--spec-draft-device", NULL }, { NULL }
};
static const program_option option_experts = {
    { "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", NULL },
    { "LLAMA_ARG_CPU_MOE", "LLAMA_ARG_N_CPU_MOE", NULL }
};
static const program_option option_dense = { { "-ncffn", "--n-cpu-ffn", NULL },
                                             { "LLAMA_ARG_N_CPU_FFN", NULL } };
static const program_option option_no_offload = { { "-nkvo", "--no-kv-offload", NULL }, { NULL } };
static const program_option option_bench_fit = {
    { "-fitt", "--fit-target", "-fitc", "--fit-ctx", NULL }, { NULL }
};

bool gpu_is_left_out(const device_list *list)
{
    return list->n_gpus == 0 && list->n_others > 0 && (list->has_kvant || !list->has_cuda);
}

bool gpu_has_vision(const program *p)
{
    return program_value(p, &option_vision, NULL) != NULL &&
           program_value(p, &option_vision_device, NULL) == NULL;
}

bool gpu_has_draft(const program *p)
{
    return (program_value(p, &option_draft, NULL) != NULL ||
            program_value(p, &option_draft_repository, NULL) != NULL) &&
           program_value(p, &option_draft_device, NULL) == NULL;
}

const char *gpu_user_tensors(const program *p)
{
    return program_value(p, &option_tensors, NULL);
}

const char *gpu_user_split(const program *p)
{
    return program_value(p, &option_split, NULL);
}

const char *gpu_user_mode(const program *p)
{
    return program_value(p, &option_mode, NULL);
}

/* Two back ends can list the same card, as Vulkan0 and as ROCm0. One of them is enough. */
static size_t count_gpus(const device_list *list)
{
    size_t n = 0;
    while (n < list->n_others) {
        const char *a = list->others[0].name, *b = list->others[n].name;
        while (*a == *b && *a != 0 && !isdigit((unsigned char)*a))
            a++, b++;
        if ((*a != 0 && !isdigit((unsigned char)*a)) || (*b != 0 && !isdigit((unsigned char)*b)))
            break;
        n++;
    }
    return n;
}

/* -ngl counts the output as a layer. */
static void read_wanted(const program *p, gpu_plan *plan)
{
    const char *given = program_value(p, &option_layers, NULL);
    char *end = NULL;
    const unsigned long n = given != NULL ? strtoul(given, &end, 10) : 0;
    plan->n_wanted = plan->n_layers;
    if (given == NULL || end == given || *end != 0 || given[0] == '-' || n > plan->n_layers)
        return;
    plan->keeps_output = n == 0;
    plan->n_wanted = n > 0 ? (uint32_t)n - 1 : 0;
}

/* Whether the user says which weights stay on the CPU: what a layer takes of a GPU is not known
 * then, and the user's choice counts. */
static bool weights_are_chosen(const program *p)
{
    return program_value(p, &option_experts, NULL) != NULL ||
           program_value(p, &option_dense, NULL) != NULL;
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

/* Bytes of the vision model and of the draft model where the first GPU holds them. */
static uint64_t bytes_of_others(const program *p)
{
    const char *draft = gpu_has_draft(p) ? program_value(p, &option_draft, NULL) : NULL;
    const char *vision = gpu_has_vision(p) ? program_value(p, &option_vision, NULL) : NULL;
    return (draft != NULL ? gguf_bytes(draft) : 0) + (vision != NULL ? gguf_bytes(vision) : 0);
}

/* The first GPUs are filled first, so that one is enough where the model fits it. */
static void place_layers(const program *p, const device_list *list, gpu_plan *plan)
{
    const char *model = program_value(p, &option_model, NULL);
    gguf_size size = { .n_layers = 0 };
    const bool known = model != NULL && gguf_read_size(model, &size);
    plan->n_gpus = count_gpus(list);
    plan->n_layers = known ? size.n_layers : 0;
    read_wanted(p, plan);
    for (size_t i = 0; i < plan->n_gpus && plan->n_placed < plan->n_wanted; i++) {
        const uint32_t left = plan->n_wanted - plan->n_placed;
        const uint64_t taken = i == 0 ? bytes_of_others(p) : 0;
        const uint32_t fit = weights_are_chosen(p) ? left : room(&list->others[i], taken, &size);
        plan->on[i] = fit < left ? fit : left;
        plan->n_placed += plan->on[i];
    }
}

/* Always true, so that a search for problems ends with it. */
__attribute__((format(printf, 2, 3))) static bool refuse(gpu_plan *plan, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(plan->problem, sizeof plan->problem, format, args);
    va_end(args);
    return true;
}

static bool refuse_given(const program *p, const program_option *option, gpu_plan *plan)
{
    const char *name = NULL;
    return program_value(p, option, &name) != NULL && refuse(plan, "%s is given", name);
}

static int count_words(const program *p, const program_option *option)
{
    int n = 0;
    for (int i = 1; i < p->argc; i++)
        n += program_word_is(p->argv[i], option);
    return n;
}

/* llama-bench runs once for each value of a list, 10,20 or 0-30+10, and of a repeated option. */
static bool is_list(const program *p, const program_option *option)
{
    const char *value = program_value(p, option, NULL);
    return count_words(p, option) > 1 ||
           (value != NULL && value[0] != 0 && strpbrk(value + 1, ",-") != NULL);
}

static bool has_problem_of_bench(const program *p, gpu_plan *plan)
{
    if (count_words(p, &option_model) > 1)
        return refuse(plan, "llama-bench is given several models");
    if (is_list(p, &option_layers) || is_list(p, &option_no_offload))
        return refuse(plan, "llama-bench is given several values of %s",
                      is_list(p, &option_layers) ? "-ngl" : "-nkvo");
    return refuse_given(p, &option_bench_fit, plan) || refuse_given(p, &option_experts, plan);
}

/* llama.cpp takes the first pattern that matches a tensor, so the user's must come before ours.
 * They come after ours where another program starts llama.cpp. */
static bool has_problem_of_weights(const program *p, gpu_plan *plan)
{
    return (plan->n_gpus > 1 || p->n_before > 0) &&
           (refuse_given(p, &option_experts, plan) || refuse_given(p, &option_dense, plan));
}

static bool has_problem_of_model(const program *p, gpu_plan *plan)
{
    const char *model = program_value(p, &option_model, NULL);
    if (plan->n_layers > 0 || plan->keeps_output)
        return false;
    if (model == NULL)
        return refuse(plan, "no -m names the model's file, which has the number of its layers");
    return refuse(plan, "the number of layers cannot be read from %s", model);
}

static bool has_problem(const program *p, const device_list *list, gpu_plan *plan)
{
    const char *mode = program_value(p, &option_mode, NULL);
    if (list->has_cuda)
        return refuse(plan, "kvant does not work on NVIDIA GPUs here (run make cuda if "
                            "libkvant_cuda.so is missing, or unset KVANT_GPU=0)");
    if (refuse_given(p, &option_device, plan) || refuse_given(p, &option_split, plan) ||
        refuse_given(p, &option_tensors, plan))
        return true;
    if (mode != NULL && strcmp(mode, "layer") != 0)
        return refuse_given(p, &option_mode, plan);
    if (program_is_bench(p) ? has_problem_of_bench(p, plan) : has_problem_of_weights(p, plan))
        return true;
    if (program_keeps_cache(p) && count_words(p, &option_no_offload) == 0)
        return refuse(plan, "a variable keeps the cache from kvant: unset LLAMA_ARG_KV_OFFLOAD and "
                            "LLAMA_ARG_NO_KV_OFFLOAD");
    if (has_problem_of_model(p, plan))
        return true;
    return plan->n_wanted > 0 && plan->n_placed == 0 &&
           refuse(plan, "%s has not enough free memory for them", list->others[0].name);
}

static void begin(gpu_plan *plan, const char *flag)
{
    plan->n_text += plan->n_words > 0; /* the end of the value before */
    plan->words[plan->n_words++] = program_argument(flag);
    plan->words[plan->n_words++] = plan->text + plan->n_text;
}

__attribute__((format(printf, 2, 3))) static void add(gpu_plan *plan, const char *format, ...)
{
    const size_t left = sizeof plan->text - plan->n_text;
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(plan->text + plan->n_text, left, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < left - 1)
        plan->n_text += (size_t)n;
    else
        refuse(plan, "the flags are too long");
}

/* OpenCL's buffers have another name than its device. */
static const char *buffer_name(const device *gpu)
{
    return strcmp(gpu->name, "GPUOpenCL") == 0 ? "OpenCL" : gpu->name;
}

/* 'blk\.(28|29)\.=Vulkan0', or 'blk\..*=Vulkan0' for all layers. */
static void add_tensors(gpu_plan *plan, const device_list *list, char separator)
{
    uint32_t layer = plan->n_layers - plan->n_placed;
    bool first = true;
    for (size_t i = 0; i < plan->n_gpus; i++) {
        if (plan->n_layers != 0 && plan->on[i] == 0)
            continue;
        if (!first)
            add(plan, "%c", separator);
        first = false;
        if (plan->on[i] == plan->n_layers) {
            add(plan, "blk\\..*=%s", buffer_name(&list->others[i]));
            return;
        }
        for (uint32_t n = 0; n < plan->on[i]; n++)
            add(plan, "%s%u", n == 0 ? "blk\\.(" : "|", (unsigned)layer++);
        add(plan, ")\\.=%s", buffer_name(&list->others[i]));
    }
}

/* How many of the GPUs are needed; one at least, for the output or for long batches. */
static size_t used_gpus(const gpu_plan *plan)
{
    size_t n = 1;
    for (size_t i = 1; i < plan->n_gpus; i++)
        n = plan->on[i] > 0 ? i + 1 : n;
    return n;
}

static void add_split(gpu_plan *plan, char between)
{
    begin(plan, "-ts");
    if (plan->keeps_output)
        add(plan, "1%c0", between);
    else if (plan->n_layers == 0)
        add(plan, "N-0.5%c1.5", between);
    else
        add(plan, "%u.5%c1.5", (unsigned)plan->n_layers - 1, between);
    for (size_t i = 1; i < used_gpus(plan); i++)
        add(plan, "%c0", between);
}

static void make_words(const program *p, const device_list *list, gpu_plan *plan)
{
    const char between = program_is_bench(p) ? '/' : ',';
    const bool places = plan->n_placed > 0 || (plan->n_layers == 0 && !plan->keeps_output);
    begin(plan, "--device");
    add(plan, PLUGIN_DEVICE);
    for (size_t i = 0; i < used_gpus(plan); i++)
        add(plan, "%c%s", between, list->others[i].name);
    add_split(plan, between);
    if (places) {
        begin(plan, "-ot");
        add_tensors(plan, list, program_is_bench(p) ? ';' : ',');
    }
    /* The main model's -ts does not suit a draft model, which has fewer layers. */
    if (gpu_has_draft(p)) {
        begin(plan, "-devd");
        add(plan, "%s", list->others[0].name);
    }
    /* A word -ngl gets its value in gpu_plan_word(). */
    if (program_value(p, &option_layers, NULL) != NULL && count_words(p, &option_layers) == 0) {
        begin(plan, "-ngl");
        add(plan, "99");
    }
}

void gpu_plan_make(const program *p, const device_list *list, gpu_plan *plan)
{
    *plan = (gpu_plan){ .adds = false };
    if (!gpu_is_left_out(list))
        return;
    place_layers(p, list, plan);
    const bool found = has_problem(p, list, plan);
    make_words(p, list, plan);
    plan->adds = !found && plan->problem[0] == 0;
}

char *gpu_plan_word(const gpu_plan *plan, const program *p, int i)
{
    static char all[] = "99", no[] = "0";
    const char *before = i > 0 ? p->argv[i - 1] : "";
    if (!plan->adds)
        return p->argv[i];
    if (program_word_is(before, &option_layers))
        return all;
    if (program_is_bench(p)) /* its -nkvo has a value */
        return program_word_is(before, &option_no_offload) ? no : p->argv[i];
    return i > 0 && program_word_is(p->argv[i], &option_no_offload) ? NULL : p->argv[i];
}

bool gpu_plan_set_variables(const gpu_plan *plan, const program *p, const device_list *list)
{
    return !plan->adds || !gpu_has_vision(p) ||
           setenv(option_vision_device.variables[0], list->others[0].name, 1) == 0;
}
