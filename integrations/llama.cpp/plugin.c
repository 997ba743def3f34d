/* plugin.c - the entry point of libggml-kvant.so. ggml calls ggml_backend_init once and gets a
 * registry entry with its devices, or NULL after a message with the reason.
 *
 * With a CUDA back end in ggml, the devices are KVANT0, KVANT1, ..., and the variable KVANT_ACCEL
 * chooses between a compressed cache and llama.cpp's own cache. Without one, the variable chooses
 * between the devices KVANT and KVANT_ACCEL. llama.cpp gives its cache to every GPU-type device
 * that it finds, so they never appear together. */
#include <stdlib.h>
#include <string.h>

#include "attributes.h"
#include "buffer.h"
#include "gpu/gpu.h"
#include "device.h"
#include "ggml_api.h"
#include "host.h"
#include "kv_fill.h"
#include "llama_states.h"
#include "log.h"
#include "offload.h"
#include "settings.h"
#include "trace.h"

KVP_EXPORT abi_reg *ggml_backend_init(void);

static abi_reg reg;
static abi_device *reg_device, *accel_device;
static size_t n_gpus; /* not 0: the devices are GPUs */

static const char *reg_get_name(abi_reg *self)
{
    (void)self;
    return "KVANT";
}

static size_t reg_get_device_count(abi_reg *self)
{
    (void)self;
    return n_gpus != 0 ? n_gpus : 1;
}

static abi_device *reg_get_device(abi_reg *self, size_t index)
{
    (void)self;
    if (n_gpus != 0)
        return kvp_gpu_device(index);
    return index == 0 ? reg_device : NULL;
}

/* Functions that ggml's tables do not have. The plug-in's own are: kvant_kv_memory, size_t
 * (*)(size_t *reserved); kvant_kv_size, kvp_kv_size_fn * (kv_size.h); kvant_kv_size_at,
 * kvp_kv_size_at_fn * (kv_fill.h); and kvant_accel_device. The last returns the device KVANT_ACCEL,
 * for programs that register it themselves next to KVANT. */
static void *reg_get_proc_address(abi_reg *self, const char *name)
{
    void (*set_n_threads)(abi_backend *, int) = kvp_backend_set_n_threads;
    size_t (*kv_memory)(size_t *) = kvp_buffer_kv_memory;
    kvp_kv_size_fn *kv_size = kvp_buffer_kv_size;
    kvp_kv_size_at_fn *kv_size_at = kvp_buffer_kv_size_at;
    void *address = NULL;

    (void)self;
    if (n_gpus != 0 && strncmp(name, "kvant_", 6) != 0)
        return kvp_gpu_inner_reg()->iface.get_proc_address(kvp_gpu_inner_reg(), name);
    if (strcmp(name, "ggml_backend_set_n_threads") == 0)
        memcpy(&address, &set_n_threads, sizeof(address));
    else if (strcmp(name, "kvant_kv_memory") == 0)
        memcpy(&address, &kv_memory, sizeof(address));
    else if (strcmp(name, "kvant_kv_size") == 0)
        memcpy(&address, &kv_size, sizeof(address));
    else if (strcmp(name, "kvant_kv_size_at") == 0)
        memcpy(&address, &kv_size_at, sizeof(address));
    else if (strcmp(name, "kvant_accel_device") == 0)
        address = accel_device;
    return address;
}

/* Finds the GPUs of a llama.cpp with CUDA. Called after the device of the computer's memory is set
 * up, because their buffers use its code. */
static void find_gpus(bool accel)
{
    char err[768] = "";

    kvp_gpu_set_accel(accel);
    n_gpus = kvp_gpu_setup(&reg, err, sizeof(err));
    if (n_gpus == 0 && err[0] != '\0')
        kvp_error(
            "warning: llama.cpp has a CUDA back end, but kvant works in the computer's memory: %s",
            err);
}

/* Loads the back end that the program needs besides the plug-in. ggml reads a single path from
 * GGML_BACKEND_PATH, and a program may need the variable itself: Ollama names CUDA's back end
 * there. `kvant exec` moves that path to KVANT_BACKEND_PATH and puts the plug-in's path in its
 * place. */
static void load_other_backend(void)
{
    static bool loads; /* ggml would call this function again for the plug-in's own path */
    const char *path = kvant_os_variable("KVANT_BACKEND_PATH");

    if (path == NULL || path[0] == '\0' || loads)
        return;
    loads = true;
    if (kvp_api.backend_load == NULL || kvp_api.backend_load(path) == NULL)
        kvp_error("warning: KVANT_BACKEND_PATH=%s is not loaded; set the path of a back end that "
                  "ggml %s can load, or unset it",
                  path, kvp_api.version);
}

/* Takes llama.cpp's functions for states over, so that programs see the size of states of codes. */
static void serve_states(bool saves_codes)
{
    const char *why = kvp_states_serve();

    if (why == NULL)
        kvp_note("serves llama.cpp's functions for saved states");
    else if (saves_codes)
        kvp_error("warning: saved states keep the length of f16 rows, with zeros in it: %s", why);
    else
        kvp_note("states of codes would keep the length of f16 rows: %s", why);
}

/* NULL after a message with the reason. */
static abi_reg *set_up(const void *caller)
{
    char err[768] = "";
    kvp_settings settings;
    kvant_scheme_info info = { .size = sizeof(info) };
    bool accel, fp32, lend, gpu, takes_gpus;

    if (!kvp_ggml_load(caller))
        return NULL;
    if (!kvp_settings_set_cpu_level(err, sizeof(err)) ||
        !kvp_settings_read(&settings, err, sizeof(err)) ||
        !kvp_settings_read_switch("KVANT_ACCEL", false, &accel, err, sizeof(err)) ||
        !kvp_settings_read_switch("KVANT_FP32", false, &fp32, err, sizeof(err)) ||
        !kvp_settings_read_switch("KVANT_GPU", kvp_api.gpus, &gpu, err, sizeof(err)) ||
        !kvp_settings_read_switch("KVANT_GPU", true, &takes_gpus, err, sizeof(err)) ||
        !kvp_settings_read_switch("KVANT_HOST_THREADS", true, &lend, err, sizeof(err))) {
        kvp_error("%s", err);
        return NULL;
    }
    kvp_log_set(settings.verbose, settings.quiet);
    kvp_trace_open();
    kvp_ggml_report();
    if (!kvp_settings_leave_states())
        serve_states(settings.saves_codes);
    kvant_scheme_get_info(settings.scheme, &info);
    if (info.settings != NULL)
        kvp_note("codecs of KVANT_CONFIG");
    else
        kvp_note("keys %s, values %s", info.k, info.v);
    reg_device = kvp_device_setup(kvp_api.api, &reg);
    accel_device = kvp_accel_setup(&reg);
    if (accel)
        reg_device = accel_device;
    load_other_backend();
    if (gpu)
        find_gpus(accel);
    if (n_gpus == 0 && !accel && takes_gpus)
        kvp_offload_setup();
    if (!gpu && !kvp_api.gpus && kvant_os_variable("KVANT_GPU") == NULL &&
        kvp_api.reg_by_name != NULL && kvp_api.reg_by_name("CUDA") != NULL)
        kvp_error("warning: kvant works in the computer's memory, because it was not tried on a "
                  "GPU with ggml %s, which is older than 0.21; KVANT_GPU=1 tries it",
                  kvp_api.version);
    reg = (abi_reg){
        .api_version = kvp_api.api,
        .iface = { .get_name = reg_get_name,
                   .get_device_count = reg_get_device_count,
                   .get_device = reg_get_device,
                   .get_proc_address = reg_get_proc_address },
    };
    return &reg;
}

abi_reg *ggml_backend_init(void)
{
    abi_reg *made = set_up(KVP_RETURN_ADDRESS());

    kvp_host_stay_loaded();

    kvp_report(made != NULL ? "loaded" : "refused");
    return made;
}
