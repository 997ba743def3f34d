/* gpu.h - a Vulkan device for compute shaders: its own VkDevice and queue, buffers, and one command
 * buffer. Knows nothing of pages. Every function ends the program with one line when Vulkan
 * fails. */
#ifndef VULKAN_GPU_H
#define VULKAN_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <vulkan/vulkan_core.h>

enum { GPU_MAX_BUFFERS = 6, GPU_MAX_STAMPS = 8 };

/* The members of push.glsl. */
typedef struct gpu_push {
    uint32_t page_words[2];
    uint32_t kv_heads, check;
    uint32_t n_tokens, blocks, part_pages, parts;
    float scale;
} gpu_push;

typedef struct gpu_buffer {
    VkBuffer buffer;
    VkDeviceMemory memory;
    size_t bytes;
    void *at; /* where the CPU sees it; NULL for memory of the GPU alone */
} gpu_buffer;

typedef struct gpu_shader {
    VkDescriptorSetLayout set;
    VkPipelineLayout layout;
    VkPipeline pipeline;
    uint32_t n_buffers;
} gpu_shader;

/* Whether libvulkan is there and lists a device with this number. Prints every device. */
bool gpu_list(uint32_t index);
/* Opens this device. Prints what decides how fast a real path would be. */
void gpu_open(uint32_t index);
const char *gpu_name(void);
bool gpu_is_cpu(void);

gpu_buffer gpu_new_buffer(size_t bytes, bool for_cpu);
void gpu_free_buffer(gpu_buffer *buffer);
/* Reads FOLDER/NAME.spv. constants are those with constant_id 0 and 1. */
gpu_shader gpu_new_shader(const char *folder, const char *name, uint32_t n_buffers,
                          uint32_t constant0, uint32_t constant1);
void gpu_free_shader(gpu_shader *shader);

/* Commands are recorded between begin and submit. Each sees what the earlier ones wrote. */
void gpu_begin(void);
void gpu_dispatch(const gpu_shader *shader, const gpu_buffer *const *buffers, const gpu_push *push,
                  uint32_t x, uint32_t y, uint32_t z);
void gpu_fill(const gpu_buffer *buffer, uint32_t word);
void gpu_copy(const gpu_buffer *to, const gpu_buffer *from);
void gpu_stamp(void);
void gpu_end(void);
/* Runs the recorded commands once, and waits. May be called again. The commands see all
 * that the CPU wrote before. */
void gpu_run(void);
/* Microseconds from stamp i to stamp i + 1 of the last run. */
double gpu_time(uint32_t i);
void gpu_close(void);

#endif
