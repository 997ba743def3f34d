/* exec_offload.h - where `kvant exec` puts weights when the program lists a GPU that kvant does not
 * work on. It owns the layers of each GPU, and the program's flags for them. The compressed cache
 * stays in the computer's memory. Messages are exec_gpu.h's. */
#pragma once

#include "devices.h"
#include "program.h"

extern const program_option option_device, option_layers, option_model;

/* --device, -ts, -ot, -devd and -ngl, with their values. */
enum { GPU_MAX_WORDS = 10 };

/* More than the longest text. A layer takes 4 bytes, and there are 512 at most. A GPU takes less
 * than 200 bytes, mostly for its name, which stands there twice. There are 16 GPUs at most. */
enum { GPU_TEXT_BYTES = 8192 };

typedef struct gpu_plan {
    bool adds;                /* exec adds the words; otherwise problem says why not */
    bool keeps_output;        /* the output stays in the computer's memory, because -ngl is 0 */
    size_t n_gpus;            /* GPUs of one back end, the first ones of the list's others */
    uint32_t n_layers;        /* of the model; 0: not known */
    uint32_t n_wanted;        /* layers that -ngl asks for */
    uint32_t n_placed;        /* the model's last layers, whose weights go to GPUs */
    uint32_t on[MAX_DEVICES]; /* layers of each GPU */
    char problem[256];
    char *words[GPU_MAX_WORDS];
    size_t n_words, n_text;
    char text[GPU_TEXT_BYTES]; /* the values of the words */
} gpu_plan;

/* Whether kvant's cache is in the computer's memory while the program lists a GPU. False where the
 * list does not tell whether kvant works on CUDA's GPUs. */
bool gpu_is_left_out(const device_list *list);

/* Decides. A list without such a GPU gives a plan that adds nothing. */
void gpu_plan_make(const program *p, const device_list *list, gpu_plan *plan);

/* The program's word i as the plan passes it on: -ngl gets a value that lets kvant have all layers'
 * caches. NULL for -nkvo, which the plan leaves out. */
char *gpu_plan_word(const gpu_plan *plan, const program *p, int i);

/* Sets the variable that gives a vision model to the GPU; llama.cpp would take the first device,
 * KVANT. False without memory. */
bool gpu_plan_set_variables(const gpu_plan *plan, const program *p, const device_list *list);

/* Whether the program loads a vision model and is not told where. */
bool gpu_has_vision(const program *p);

/* Whether the program loads a draft model and is not told where. */
bool gpu_has_draft(const program *p);

/* The values of options that the hint repeats; NULL when they are not given. */
const char *gpu_user_tensors(const program *p);
const char *gpu_user_split(const program *p);
const char *gpu_user_mode(const program *p);
