/* gpu.c - see gpu.h. libvulkan is loaded when it is needed, so the program builds with Vulkan's
 * headers alone. */
#define VK_NO_PROTOTYPES
#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vulkan_core.h>

#define FUNCTIONS(X)                                                                               \
    X(vkEnumeratePhysicalDevices)                                                                  \
    X(vkGetPhysicalDeviceProperties2)                                                              \
    X(vkGetPhysicalDeviceMemoryProperties)                                                         \
    X(vkGetPhysicalDeviceQueueFamilyProperties)                                                    \
    X(vkEnumerateDeviceExtensionProperties)                                                        \
    X(vkCreateDevice)                                                                              \
    X(vkDestroyDevice)                                                                             \
    X(vkDestroyInstance)                                                                           \
    X(vkGetDeviceQueue)                                                                            \
    X(vkCreateBuffer)                                                                              \
    X(vkDestroyBuffer)                                                                             \
    X(vkGetBufferMemoryRequirements)                                                               \
    X(vkAllocateMemory)                                                                            \
    X(vkFreeMemory)                                                                                \
    X(vkBindBufferMemory)                                                                          \
    X(vkMapMemory)                                                                                 \
    X(vkCreateShaderModule)                                                                        \
    X(vkDestroyShaderModule)                                                                       \
    X(vkCreateDescriptorSetLayout)                                                                 \
    X(vkDestroyDescriptorSetLayout)                                                                \
    X(vkCreatePipelineLayout)                                                                      \
    X(vkDestroyPipelineLayout)                                                                     \
    X(vkCreateComputePipelines)                                                                    \
    X(vkDestroyPipeline)                                                                           \
    X(vkCreateDescriptorPool)                                                                      \
    X(vkDestroyDescriptorPool)                                                                     \
    X(vkResetDescriptorPool)                                                                       \
    X(vkAllocateDescriptorSets)                                                                    \
    X(vkUpdateDescriptorSets)                                                                      \
    X(vkCreateCommandPool)                                                                         \
    X(vkDestroyCommandPool)                                                                        \
    X(vkAllocateCommandBuffers)                                                                    \
    X(vkBeginCommandBuffer)                                                                        \
    X(vkEndCommandBuffer)                                                                          \
    X(vkCmdBindPipeline)                                                                           \
    X(vkCmdBindDescriptorSets)                                                                     \
    X(vkCmdPushConstants)                                                                          \
    X(vkCmdDispatch)                                                                               \
    X(vkCmdPipelineBarrier)                                                                        \
    X(vkCmdFillBuffer)                                                                             \
    X(vkCmdCopyBuffer)                                                                             \
    X(vkCmdResetQueryPool)                                                                         \
    X(vkCmdWriteTimestamp)                                                                         \
    X(vkCreateQueryPool)                                                                           \
    X(vkDestroyQueryPool)                                                                          \
    X(vkGetQueryPoolResults)                                                                       \
    X(vkCreateFence)                                                                               \
    X(vkDestroyFence)                                                                              \
    X(vkResetFences)                                                                               \
    X(vkWaitForFences)                                                                             \
    X(vkQueueSubmit)                                                                               \
    X(vkQueueWaitIdle)

#define DECLARE(name) static PFN_##name name;
FUNCTIONS(DECLARE)

enum { MAX_DEVICES = 8, MAX_SETS = 32 };

static struct {
    VkInstance instance;
    VkPhysicalDevice physical[MAX_DEVICES];
    uint32_t n_physical, family;
    VkPhysicalDevice on;
    VkPhysicalDeviceProperties properties;
    VkDevice device;
    VkQueue queue;
    VkDescriptorPool sets;
    VkCommandPool commands;
    VkCommandBuffer command;
    VkQueryPool stamps;
    uint32_t n_stamps;
    VkFence fence;
} gpu;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "vulkan: %s failed: %s\n", what, why);
    exit(1);
}

static void check(VkResult result, const char *what)
{
    char why[32];

    if (result == VK_SUCCESS)
        return;
    snprintf(why, sizeof why, "VkResult %d", (int)result);
    fail(what, why);
}

/* The device */

static bool load(void)
{
    void *library = dlopen("libvulkan.so.1", RTLD_NOW);
    PFN_vkGetInstanceProcAddr get = NULL;
    PFN_vkCreateInstance create;
    VkResult result;
    const VkApplicationInfo app = { .sType = VK_STRUCTURE_TYPE_APPLICATION_INFO,
                                    .apiVersion = VK_API_VERSION_1_2 };
    const VkInstanceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO,
                                        .pApplicationInfo = &app };

    if (library == NULL) {
        fprintf(stderr, "vulkan: %s\n", dlerror());
        return false;
    }
    *(void **)&get = dlsym(library, "vkGetInstanceProcAddr");
    create = (PFN_vkCreateInstance)get(NULL, "vkCreateInstance");
    result = create(&info, NULL, &gpu.instance);
    if (result != VK_SUCCESS) {
        fprintf(stderr, "vulkan: vkCreateInstance failed: VkResult %d\n", (int)result);
        return false;
    }
#define LOAD(name) name = (PFN_##name)get(gpu.instance, #name);
    FUNCTIONS(LOAD)
    gpu.n_physical = MAX_DEVICES;
    return vkEnumeratePhysicalDevices(gpu.instance, &gpu.n_physical, gpu.physical) >= VK_SUCCESS;
}

bool gpu_list(uint32_t index)
{
    static const char *const types[] = { "other", "integrated GPU", "GPU", "virtual GPU", "CPU" };

    if (!load()) {
        fprintf(stderr, "vulkan: no device, because Vulkan or its drivers are not installed\n");
        return false;
    }
    for (uint32_t i = 0; i < gpu.n_physical; i++) {
        VkPhysicalDeviceDriverProperties driver = {
            .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES
        };
        VkPhysicalDeviceProperties2 p = { .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2,
                                          .pNext = &driver };
        vkGetPhysicalDeviceProperties2(gpu.physical[i], &p);
        fprintf(stderr, "vulkan: device %u: %s (%s), %s %s\n", (unsigned)i, p.properties.deviceName,
                p.properties.deviceType <= 4 ? types[p.properties.deviceType] : "?",
                driver.driverName, driver.driverInfo);
    }
    return index < gpu.n_physical;
}

/* The encoder's bytes need sums and products that are rounded to nearest. */
static void check_device(void)
{
    VkPhysicalDeviceFloatControlsProperties floats = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FLOAT_CONTROLS_PROPERTIES
    };
    VkPhysicalDeviceSubgroupProperties groups = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES, .pNext = &floats
    };
    VkPhysicalDeviceProperties2 p = { .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2,
                                      .pNext = &groups };

    vkGetPhysicalDeviceProperties2(gpu.on, &p);
    gpu.properties = p.properties;
    fprintf(stderr,
            "vulkan: subgroups of %u, subnormal fp32 numbers are %s, shared memory %u KiB\n",
            (unsigned)groups.subgroupSize,
            floats.shaderDenormPreserveFloat32 ? "kept if asked" : "not kept",
            (unsigned)p.properties.limits.maxComputeSharedMemorySize / 1024);
    if (!floats.shaderRoundingModeRTEFloat32)
        fail("the device", "it does not round to nearest when a shader asks for it");
    if ((groups.supportedOperations & VK_SUBGROUP_FEATURE_ARITHMETIC_BIT) == 0)
        fail("the device", "its subgroups cannot add");
}

/* Extensions that decide how a real path shares memory with a host engine, and how fast it is. */
static void print_extensions(void)
{
    static const char *const wanted[] = {
        "VK_EXT_external_memory_host",  "VK_KHR_external_memory_fd",
        "VK_KHR_external_semaphore_fd", "VK_KHR_cooperative_matrix",
        "VK_KHR_push_descriptor",       "VK_KHR_shader_integer_dot_product"
    };
    uint32_t n = 0;
    VkExtensionProperties *all;

    vkEnumerateDeviceExtensionProperties(gpu.on, NULL, &n, NULL);
    all = calloc(n + 1, sizeof *all);
    if (all == NULL || vkEnumerateDeviceExtensionProperties(gpu.on, NULL, &n, all) < VK_SUCCESS)
        fail("the list of extensions", "no memory");
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        uint32_t j = 0;
        while (j < n && strcmp(all[j].extensionName, wanted[i]) != 0)
            j++;
        fprintf(stderr, "vulkan: %s: %s\n", wanted[i], j < n ? "yes" : "no");
    }
    free(all);
}

static uint32_t find_family(void)
{
    VkQueueFamilyProperties families[16];
    uint32_t n = 16;

    vkGetPhysicalDeviceQueueFamilyProperties(gpu.on, &n, families);
    for (uint32_t i = 0; i < n; i++)
        if ((families[i].queueFlags & VK_QUEUE_COMPUTE_BIT) && families[i].timestampValidBits > 0)
            return i;
    fail("the device", "it has no queue that computes and tells the time");
    return 0;
}

static void make_pools(void)
{
    const VkDescriptorPoolSize size = { VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                                        MAX_SETS * GPU_MAX_BUFFERS };
    const VkDescriptorPoolCreateInfo sets = { .sType =
                                                  VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO,
                                              .maxSets = MAX_SETS,
                                              .poolSizeCount = 1,
                                              .pPoolSizes = &size };
    const VkCommandPoolCreateInfo commands = { .sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
                                               .flags =
                                                   VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
                                               .queueFamilyIndex = gpu.family };
    VkCommandBufferAllocateInfo command = { .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
                                            .level = VK_COMMAND_BUFFER_LEVEL_PRIMARY,
                                            .commandBufferCount = 1 };
    const VkQueryPoolCreateInfo stamps = { .sType = VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO,
                                           .queryType = VK_QUERY_TYPE_TIMESTAMP,
                                           .queryCount = GPU_MAX_STAMPS };
    const VkFenceCreateInfo fence = { .sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO };

    check(vkCreateDescriptorPool(gpu.device, &sets, NULL, &gpu.sets), "vkCreateDescriptorPool");
    check(vkCreateCommandPool(gpu.device, &commands, NULL, &gpu.commands), "vkCreateCommandPool");
    command.commandPool = gpu.commands;
    check(vkAllocateCommandBuffers(gpu.device, &command, &gpu.command), "vkAllocateCommandBuffers");
    check(vkCreateQueryPool(gpu.device, &stamps, NULL, &gpu.stamps), "vkCreateQueryPool");
    check(vkCreateFence(gpu.device, &fence, NULL, &gpu.fence), "vkCreateFence");
}

void gpu_open(uint32_t index)
{
    const float priority = 1;
    VkDeviceQueueCreateInfo queue = { .sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO,
                                      .queueCount = 1,
                                      .pQueuePriorities = &priority };
    const VkDeviceCreateInfo info = { .sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO,
                                      .queueCreateInfoCount = 1,
                                      .pQueueCreateInfos = &queue };

    gpu.on = gpu.physical[index];
    check_device();
    print_extensions();
    gpu.family = queue.queueFamilyIndex = find_family();
    check(vkCreateDevice(gpu.on, &info, NULL, &gpu.device), "vkCreateDevice");
    vkGetDeviceQueue(gpu.device, gpu.family, 0, &gpu.queue);
    make_pools();
}

const char *gpu_name(void)
{
    return gpu.properties.deviceName;
}

bool gpu_is_cpu(void)
{
    return gpu.properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
}

void gpu_close(void)
{
    vkDestroyFence(gpu.device, gpu.fence, NULL);
    vkDestroyQueryPool(gpu.device, gpu.stamps, NULL);
    vkDestroyCommandPool(gpu.device, gpu.commands, NULL);
    vkDestroyDescriptorPool(gpu.device, gpu.sets, NULL);
    vkDestroyDevice(gpu.device, NULL);
    vkDestroyInstance(gpu.instance, NULL);
}

/* Buffers */

/* The first memory type that has the flags and may hold the buffer. Among types for the CPU, one
 * that is cached is better, because the CPU reads results from it. */
static uint32_t memory_type(uint32_t allowed, bool for_cpu)
{
    static const VkMemoryPropertyFlags wanted[2][2] = {
        { VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, 0 },
        { VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT |
              VK_MEMORY_PROPERTY_HOST_CACHED_BIT,
          VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT }
    };
    VkPhysicalDeviceMemoryProperties memory;

    vkGetPhysicalDeviceMemoryProperties(gpu.on, &memory);
    for (int i = 0; i < 2; i++)
        for (uint32_t type = 0; type < memory.memoryTypeCount; type++) {
            const VkMemoryPropertyFlags flags = wanted[for_cpu][i];
            if ((allowed >> type & 1) != 0 &&
                (memory.memoryTypes[type].propertyFlags & flags) == flags)
                return type;
        }
    fail("the device", "it has no memory of the kind that a buffer needs");
    return 0;
}

gpu_buffer gpu_new_buffer(size_t bytes, bool for_cpu)
{
    gpu_buffer b = { .bytes = bytes };
    const VkBufferCreateInfo info = { .sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO,
                                      .size = bytes,
                                      .usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT |
                                               VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                                               VK_BUFFER_USAGE_TRANSFER_DST_BIT };
    VkMemoryRequirements needs;
    VkMemoryAllocateInfo memory = { .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO };

    if (bytes > gpu.properties.limits.maxStorageBufferRange)
        fail("a buffer", "it is larger than the device allows");
    check(vkCreateBuffer(gpu.device, &info, NULL, &b.buffer), "vkCreateBuffer");
    vkGetBufferMemoryRequirements(gpu.device, b.buffer, &needs);
    memory.allocationSize = needs.size;
    memory.memoryTypeIndex = memory_type(needs.memoryTypeBits, for_cpu);
    check(vkAllocateMemory(gpu.device, &memory, NULL, &b.memory), "vkAllocateMemory");
    check(vkBindBufferMemory(gpu.device, b.buffer, b.memory, 0), "vkBindBufferMemory");
    if (for_cpu)
        check(vkMapMemory(gpu.device, b.memory, 0, VK_WHOLE_SIZE, 0, &b.at), "vkMapMemory");
    return b;
}

void gpu_free_buffer(gpu_buffer *buffer)
{
    vkDestroyBuffer(gpu.device, buffer->buffer, NULL);
    vkFreeMemory(gpu.device, buffer->memory, NULL);
    *buffer = (gpu_buffer){ 0 };
}

/* Shaders */

static VkShaderModule load_module(const char *folder, const char *name)
{
    char path[4096];
    VkShaderModule module;
    VkShaderModuleCreateInfo info = { .sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO };
    uint32_t *words = malloc(1 << 20);
    FILE *file;

    snprintf(path, sizeof path, "%s/%s.spv", folder, name);
    file = fopen(path, "rb");
    if (file == NULL || words == NULL)
        fail(path, "it cannot be read");
    info.codeSize = fread(words, 1, 1 << 20, file);
    info.pCode = words;
    fclose(file);
    check(vkCreateShaderModule(gpu.device, &info, NULL, &module), path);
    free(words);
    return module;
}

static void make_layouts(gpu_shader *s)
{
    VkDescriptorSetLayoutBinding bindings[GPU_MAX_BUFFERS];
    const VkDescriptorSetLayoutCreateInfo set = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO,
        .bindingCount = s->n_buffers,
        .pBindings = bindings
    };
    const VkPushConstantRange range = { VK_SHADER_STAGE_COMPUTE_BIT, 0, sizeof(gpu_push) };
    const VkPipelineLayoutCreateInfo layout = { .sType =
                                                    VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO,
                                                .setLayoutCount = 1,
                                                .pSetLayouts = &s->set,
                                                .pushConstantRangeCount = 1,
                                                .pPushConstantRanges = &range };

    for (uint32_t i = 0; i < s->n_buffers; i++)
        bindings[i] = (VkDescriptorSetLayoutBinding){ i, VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 1,
                                                      VK_SHADER_STAGE_COMPUTE_BIT, NULL };
    check(vkCreateDescriptorSetLayout(gpu.device, &set, NULL, &s->set), "a shader's buffers");
    check(vkCreatePipelineLayout(gpu.device, &layout, NULL, &s->layout), "a shader's layout");
}

gpu_shader gpu_new_shader(const char *folder, const char *name, uint32_t n_buffers,
                          uint32_t constant0, uint32_t constant1)
{
    const uint32_t constants[2] = { constant0, constant1 };
    const VkSpecializationMapEntry entries[2] = { { 0, 0, 4 }, { 1, 4, 4 } };
    const VkSpecializationInfo special = { 2, entries, sizeof constants, constants };
    gpu_shader s = { .n_buffers = n_buffers };
    VkComputePipelineCreateInfo info = { .sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO };

    make_layouts(&s);
    info.layout = s.layout;
    info.stage =
        (VkPipelineShaderStageCreateInfo){ .sType =
                                               VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO,
                                           .stage = VK_SHADER_STAGE_COMPUTE_BIT,
                                           .module = load_module(folder, name),
                                           .pName = "main",
                                           .pSpecializationInfo = &special };
    check(vkCreateComputePipelines(gpu.device, NULL, 1, &info, NULL, &s.pipeline), name);
    vkDestroyShaderModule(gpu.device, info.stage.module, NULL);
    return s;
}

void gpu_free_shader(gpu_shader *shader)
{
    vkDestroyPipeline(gpu.device, shader->pipeline, NULL);
    vkDestroyPipelineLayout(gpu.device, shader->layout, NULL);
    vkDestroyDescriptorSetLayout(gpu.device, shader->set, NULL);
    *shader = (gpu_shader){ 0 };
}

/* Commands */

void gpu_begin(void)
{
    const VkCommandBufferBeginInfo begin = { .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO };

    check(vkResetDescriptorPool(gpu.device, gpu.sets, 0), "vkResetDescriptorPool");
    check(vkBeginCommandBuffer(gpu.command, &begin), "vkBeginCommandBuffer");
    vkCmdResetQueryPool(gpu.command, gpu.stamps, 0, GPU_MAX_STAMPS);
    gpu.n_stamps = 0;
}

static void order(void)
{
    const VkPipelineStageFlags stages =
        VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT;
    const VkMemoryBarrier barrier = { .sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
                                      .srcAccessMask =
                                          VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT,
                                      .dstAccessMask =
                                          VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT |
                                          VK_ACCESS_TRANSFER_READ_BIT |
                                          VK_ACCESS_TRANSFER_WRITE_BIT | VK_ACCESS_HOST_READ_BIT };

    vkCmdPipelineBarrier(gpu.command, stages, stages | VK_PIPELINE_STAGE_HOST_BIT, 0, 1, &barrier,
                         0, NULL, 0, NULL);
}

void gpu_dispatch(const gpu_shader *shader, const gpu_buffer *const *buffers, const gpu_push *push,
                  uint32_t x, uint32_t y, uint32_t z)
{
    const VkDescriptorSetAllocateInfo info = { .sType =
                                                   VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO,
                                               .descriptorPool = gpu.sets,
                                               .descriptorSetCount = 1,
                                               .pSetLayouts = &shader->set };
    VkDescriptorBufferInfo in[GPU_MAX_BUFFERS];
    VkWriteDescriptorSet write = { .sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET,
                                   .descriptorCount = shader->n_buffers,
                                   .descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                                   .pBufferInfo = in };

    check(vkAllocateDescriptorSets(gpu.device, &info, &write.dstSet), "vkAllocateDescriptorSets");
    for (uint32_t i = 0; i < shader->n_buffers; i++)
        in[i] = (VkDescriptorBufferInfo){ buffers[i]->buffer, 0, VK_WHOLE_SIZE };
    vkUpdateDescriptorSets(gpu.device, 1, &write, 0, NULL);
    vkCmdBindPipeline(gpu.command, VK_PIPELINE_BIND_POINT_COMPUTE, shader->pipeline);
    vkCmdBindDescriptorSets(gpu.command, VK_PIPELINE_BIND_POINT_COMPUTE, shader->layout, 0, 1,
                            &write.dstSet, 0, NULL);
    vkCmdPushConstants(gpu.command, shader->layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, sizeof *push,
                       push);
    vkCmdDispatch(gpu.command, x, y, z);
    order();
}

void gpu_fill(const gpu_buffer *buffer, uint32_t word)
{
    vkCmdFillBuffer(gpu.command, buffer->buffer, 0, VK_WHOLE_SIZE, word);
    order();
}

void gpu_copy(const gpu_buffer *to, const gpu_buffer *from)
{
    const VkBufferCopy all = { 0, 0, from->bytes };

    vkCmdCopyBuffer(gpu.command, from->buffer, to->buffer, 1, &all);
    order();
}

void gpu_stamp(void)
{
    vkCmdWriteTimestamp(gpu.command, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, gpu.stamps,
                        gpu.n_stamps++);
}

void gpu_end(void)
{
    check(vkEndCommandBuffer(gpu.command), "vkEndCommandBuffer");
}

void gpu_run(void)
{
    const VkSubmitInfo info = { .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO,
                                .commandBufferCount = 1,
                                .pCommandBuffers = &gpu.command };

    check(vkQueueSubmit(gpu.queue, 1, &info, gpu.fence), "vkQueueSubmit");
    check(vkWaitForFences(gpu.device, 1, &gpu.fence, VK_TRUE, UINT64_MAX), "vkWaitForFences");
    check(vkResetFences(gpu.device, 1, &gpu.fence), "vkResetFences");
}

double gpu_time(uint32_t i)
{
    uint64_t at[2] = { 0, 0 };

    check(vkGetQueryPoolResults(gpu.device, gpu.stamps, i, 2, sizeof at, at, sizeof *at,
                                VK_QUERY_RESULT_64_BIT | VK_QUERY_RESULT_WAIT_BIT),
          "vkGetQueryPoolResults");
    return (double)(at[1] - at[0]) * gpu.properties.limits.timestampPeriod / 1000;
}
