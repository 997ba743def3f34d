/* exec_gpu.h - what `kvant exec` says of the GPUs that a program lists: which of them its flags
 * leave unused, and which flags use them. It changes no flag. */
#ifndef KVANT_TOOLS_EXEC_GPU_H
#define KVANT_TOOLS_EXEC_GPU_H

#include "devices.h"
#include "program.h"

extern const program_option option_device, option_layers, option_model;

/* Whether kvant's cache is in the computer's memory while the program lists a GPU. */
bool gpu_is_left_out(const device_list *list);

/* Whether a value of --device names a device of kvant's. */
bool gpu_names_kvant(const char *devices);

/* One line on stderr where the devices that the program will have leave a listed GPU unused. added:
 * --device KVANT is exec's, not the user's. */
void gpu_say_unused(const program *p, const device_list *list, bool added);

/* One hint on stderr: the flags that leave weights on such a GPU and give the cache to kvant. */
void gpu_hint_flags(const program *p, const device_list *list);

/* One line on stderr: whose attention --accel computes. */
void gpu_say_accel(const program *p, const device_list *list);

#endif /* KVANT_TOOLS_EXEC_GPU_H */
