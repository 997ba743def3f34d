/* streams.cu - the time of a CUDA graph's kernels after several streams of the process have
 * launched some.
 *
 *     nvcc -O2 -o streams bench/cuda/streams.cu && ./streams
 *
 * Each line is a process. It prints microseconds per empty kernel of a graph of 2000 kernels,
 * before and after a number of streams have launched a number of kernels. A negative number of
 * streams launches graphs of 20 kernels instead. Each stream waits for the stream before it. */
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sys/wait.h>
#include <unistd.h>

#include <cuda_runtime.h>

namespace
{

constexpr int KERNELS = 2000, TIMES = 12, MOST = 4;

void check(cudaError_t error)
{
    if (error == cudaSuccess)
        return;
    std::fprintf(stderr, "streams: %s\n", cudaGetErrorString(error));
    std::exit(1);
}

__global__ void empty()
{
}

cudaGraphExec_t graph_of(cudaStream_t stream, int kernels)
{
    cudaGraph_t graph;
    cudaGraphExec_t run;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kernels; i++)
        empty<<<1, 32, 0, stream>>>();
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&run, graph, 0));
    return run;
}

double microseconds(cudaGraphExec_t run, cudaStream_t stream)
{
    double least = 1e9;
    for (int i = 0; i < TIMES; i++) {
        const auto begin = std::chrono::steady_clock::now();
        check(cudaGraphLaunch(run, stream));
        check(cudaStreamSynchronize(stream));
        const std::chrono::duration<double, std::micro> took =
            std::chrono::steady_clock::now() - begin;
        least = took.count() < least ? took.count() : least;
    }
    return least / KERNELS;
}

void measure(int n_streams, int launches, bool graphs)
{
    cudaStream_t streams[MOST];
    cudaEvent_t events[MOST];
    for (int i = 0; i < n_streams; i++) {
        check(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
        check(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
    }
    const cudaGraphExec_t timed = graph_of(streams[0], KERNELS), small = graph_of(streams[0], 20);
    const double before = microseconds(timed, streams[0]);
    for (int i = 0; i < launches; i++)
        for (int s = 0; s < n_streams; s++) {
            if (graphs)
                check(cudaGraphLaunch(small, streams[s]));
            else
                empty<<<1, 32, 0, streams[s]>>>();
            check(cudaEventRecord(events[s], streams[s]));
            check(cudaStreamWaitEvent(streams[(s + 1) % n_streams], events[s], 0));
        }
    check(cudaDeviceSynchronize());
    std::printf("%d,%d,%.3f,%.3f\n", graphs ? -n_streams : n_streams, launches, before,
                microseconds(timed, streams[0]));
}

} // namespace

int main()
{
    constexpr int LAUNCHES[] = { 4, 8, 16, 1000 };
    std::printf("streams that launch,launches in each,us per empty kernel before,after\n");
    for (const bool graphs : { false, true })
        for (int n_streams = 1; n_streams <= 3; n_streams++)
            for (const int launches : LAUNCHES) {
                std::fflush(stdout);
                if (fork() == 0) {
                    measure(n_streams, launches, graphs);
                    std::fflush(stdout);
                    _exit(0);
                }
                wait(nullptr);
            }
}
