/* plugin_model.h - a model on the device of a plug-in, for programs of this folder. */
#ifndef PLUGIN_MODEL_H
#define PLUGIN_MODEL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "llama.h"

static inline void quiet(enum ggml_log_level level, const char *message, void *data)
{
    (void)level;
    (void)message;
    (void)data;
}

/* Loads the model with all layers on the plug-in's first device; plugin "none": on llama.cpp's own
 * device. Ends the program when there is no such device. */
static inline struct llama_model *load_model(const char *libraries, const char *plugin,
                                             const char *path)
{
    struct llama_model_params params = llama_model_default_params();
    ggml_backend_dev_t devices[2] = { NULL, NULL };
    struct llama_model *model;

    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(libraries);
    if (strcmp(plugin, "none") != 0) {
        devices[0] = ggml_backend_reg_dev_get(ggml_backend_load(plugin), 0);
        params.devices = devices;
    }
    params.n_gpu_layers = 99;
    model = llama_model_load_from_file(path, params);
    if (model == NULL) {
        fprintf(stderr, "loading %s failed\n", path);
        exit(1);
    }
    return model;
}

#endif /* PLUGIN_MODEL_H */
