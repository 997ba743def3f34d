/* exec_offload.h - the devices that `kvant exec` names when the program lists GPUs for which kvant
 * has no kernels. The plug-in keeps their caches in the computer's memory, and llama.cpp places
 * weights as without kvant. Only layers whose weights stay on the CPU need flags, so that kvant has
 * their caches, too: the device KVANT gets these layers. Messages are exec_gpu.h's. */
#pragma once

#include "devices.h"
#include "program.h"

extern const program_option option_device, option_layers, option_model;

/* --device, -ts and -ngl, with their values. */
enum { GPU_MAX_WORDS = 6 };

typedef struct gpu_plan {
    bool on_gpu;              /* weights are on GPUs whose caches are kvant's */
    bool splits;              /* KVANT gets layers, and exec knows how many */
    size_t n_gpus;            /* GPUs of one back end, the first ones of the list's others */
    uint32_t n_layers;        /* of the model; 0: not known */
    uint32_t n_wanted;        /* layers that -ngl asks for */
    uint32_t n_placed;        /* the model's last layers, whose weights go to GPUs */
    bool keeps_output;        /* the output stays in the computer's memory, because -ngl is 0 */
    uint32_t on[MAX_DEVICES]; /* layers of each GPU */
    char *words[GPU_MAX_WORDS];
    size_t n_words;
    char devices[MAX_DEVICES * sizeof(((device *)0)->name)], shares[MAX_DEVICES * 8];
} gpu_plan;

/* Whether kvant's cache is in the computer's memory while the program lists a GPU. False where the
 * list does not tell whether kvant works on CUDA's GPUs. */
bool gpu_is_left_out(const device_list *list);

/* Decides. A list without such a GPU gives a plan that adds nothing. */
void gpu_plan_make(const program *p, const device_list *list, gpu_plan *plan);

/* The program's word i as the plan passes it on: -ngl gets a value that lets kvant have all layers'
 * caches. NULL for -nkvo, which the plan leaves out. */
char *gpu_plan_word(const gpu_plan *plan, const program *p, int i);

/* Whether the plan leaves a -nkvo out. */
bool gpu_plan_drops_keeping(const gpu_plan *plan, const program *p);

/* Adds words to a text; what does not fit is cut. */
__attribute__((format(printf, 3, 4))) void gpu_add(char *text, size_t bytes, const char *format,
                                                   ...);

/* Whether a value of --device names a device whose caches are kvant's. */
bool gpu_names_kvant(const char *devices, const device_list *list);
