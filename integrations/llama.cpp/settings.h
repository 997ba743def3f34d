/* settings.h - the settings of the user, from environment variables.
 *
 *   KVANT_PRESET          quality, balanced, small or tiny                   default balanced
 *   KVANT_K, KVANT_V      codec specs of keys and values, instead of a       default none
 *                         preset; one alone serves both
 *   KVANT_CONFIG          a settings file, instead of both                   default none
 *   KVANT_PROTECT         this many first and last layers use another codec    default 0
 *   KVANT_PROTECT_CODEC   the codec of these layers, keys and values         default f16
 *   KVANT_CALIBRATION     calibration file                                   default: model.kvcal
 *                                                                            next to model.gguf
 *   KVANT_SEED            seed of signs and rotations                        default 0
 *   KVANT_HEAD_DIM        head_dim of the model, 1 to 512                    default: graph's
 *   KVANT_CPU             CPU level: auto, c, avx2, avx2vnni, avx512,        default auto
 *                         avx512vnni, avx512vbmi, neon, neondot
 *   KVANT_FP32            1: attention multiplies in fp32; slow, for         default 0
 *                         comparisons
 *   KVANT_ACCEL           1: the device KVANT_ACCEL, which keeps             default 0
 *                         llama.cpp's own cache
 *   KVANT_GPU             0: only the device KVANT has kvant's caches, in    default 1; 0 for
 *                         the computer's memory                              CUDA before ggml 0.21
 *   KVANT_EXACT           auto, or the most tokens: a cache is llama.cpp's   default auto
 *                         own f16 while it fits into the memory that the
 *                         compressed cache takes (on a CPU: 512 tokens)
 *   KVANT_STATES          codes: saved states hold codes and transforms      default: decoded
 *                         (state.h); auto: where they are packed, too        rows, and codes can
 *                         (llama_states.h); rows: decoded rows, and          be restored
 *                         llama.cpp's functions are left alone
 *   KVANT_GRAPH           0: a GPU's graphs are not captured as one          default 1
 *   KVANT_HOST_THREADS    0: kvant's own threads, not llama.cpp's            default 1
 *   KVANT_STRICT_GGML     1: only with a ggml that all tests run with        default 0
 *   KVANT_TRACE           file that gets what happens to cells (trace.h)     default none
 *   KVANT_VERBOSE         1: print what is created                           default 0
 *   KVANT_QUIET           1: no line at the start of a context               default 0
 *
 * KVANT_CPU, KVANT_STRICT_GGML, KVANT_TRACE, KVANT_VERBOSE and KVANT_QUIET hold for the process and
 * are read when the plug-in is loaded. All other variables are checked then. They are read again
 * once per context, when llama.cpp creates the context's back ends. So one process may create
 * contexts with different settings.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvant/scheme.h>

#include "model_file.h"

#define KVP_MAX_PROTECT 1000 /* beyond the layers of any model */

typedef struct kvp_settings {
    kvant_scheme *scheme; /* is never freed */
    /* schemes for caches of latents (mla.h); NULL: they stay uncompressed */
    kvant_scheme *latents, *rope;
    uint32_t head_dim; /* 0: the graph shows it */
    /* The most tokens that a cache keeps as f16 itself, if they fit. With `auto_exact` (the
     * default), a GPU's cache keeps all that fit, and a CPU's as many as kv_fill.c says. */
    uint32_t exact;
    bool auto_exact;
    bool wants_exact; /* the user set KVANT_EXACT, and not to 0 */
    bool saves_codes; /* states hold codes */
    bool chose_codes; /* the user did not choose them, KVANT_STATES=auto did */
    bool verbose, quiet;
    char label[160];                  /* the user's choice: a preset, specs or a settings file */
    char remark[KVP_MODEL_PATH + 64]; /* for a preset: whether it is calibrated; otherwise "" */
} kvp_settings;

/* Reads and checks the environment. On failure *settings is unspecified, and err holds one line:
 * the variable, the fault and the valid values. */
bool kvp_settings_read(kvp_settings *settings, char *err, size_t errlen);

/* Whether llama.cpp's functions for states are left alone: KVANT_STATES=rows. */
bool kvp_settings_leave_states(void);

/* For a context whose model is loaded: loads the calibration next to the model file, if the preset
 * has none. */
void kvp_settings_find_calibration(kvp_settings *settings);

/* Reads a variable that is 0 or 1, again for every context. *on is false on failure. */
bool kvp_settings_read_switch(const char *name, bool fallback, bool *on, char *err, size_t errlen);

/* Applies KVANT_CPU to the whole process. Called once, when the plug-in is loaded. */
bool kvp_settings_set_cpu_level(char *err, size_t errlen);
