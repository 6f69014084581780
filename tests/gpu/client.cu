// A CUDA program for the checks on a real GPU: what a client sees, and clients that compute, hold on or fault.
//
//   client props            the GPU, its multiprocessors and memory as this process sees them
//   client alloc MIB        allocates up to MIB MiB and says where it stopped
//   client keep SECONDS MIB allocates up to MIB MiB, says how much it got, and goes on as hold
//   client hold SECONDS     short kernels until the time is up; the number of rounds
//   client long SECONDS     one kernel that runs about that long
//   client fill SECONDS     the same with every thread of the GPU
//   client sleep SECONDS    holds the GPU and does nothing with it
//   client fault            an illegal address
//   client stubborn SECONDS faults with the others and does not exit before the time is up
//   client deaf SECONDS     holds the GPU while every other thread of the process, CUDA's own too, sleeps in a signal handler
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

#define CHECK(call)                                                                             \
    do {                                                                                        \
        cudaError_t e_ = (call);                                                                \
        if (e_ != cudaSuccess) {                                                                \
            printf("%s pid %d: %s: %s (%d)\n", what, getpid(), #call, cudaGetErrorString(e_), e_); \
            fflush(stdout);                                                                     \
            exit(4);                                                                            \
        }                                                                                       \
    } while (0)

static const char *what = "client";

__global__ void spin(float *out, long long rounds) {
    float a = threadIdx.x, b = 1.000001f;
    for (long long i = 0; i < rounds; i++) a = a * b + 0.5f;
    out[blockIdx.x * blockDim.x + threadIdx.x] = a;
}

__global__ void wait_cycles(long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}

__global__ void break_it() { *(volatile int *)0 = 1; }

// The handler of a thread that shall not get on any more.
static void sleep_for_ever(int) {
    for (;;) pause();
}

// Has every thread of this process sleep but the calling one.
static void deafen_the_others() {
    struct sigaction action = {};
    action.sa_handler = sleep_for_ever;
    sigfillset(&action.sa_mask);
    sigaction(SIGUSR1, &action, nullptr);
    int others = 0;
    DIR *tasks = opendir("/proc/self/task");
    while (dirent *task = readdir(tasks)) {
        int tid = atoi(task->d_name);
        if (tid > 0 && tid != (int)syscall(SYS_gettid)) others += !syscall(SYS_tgkill, getpid(), tid, SIGUSR1);
    }
    closedir(tasks);
    printf("deaf pid %d other threads %d\n", getpid(), others);
}

static double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    what = argv[1];
    double amount = argc > 2 ? atof(argv[2]) : 0;
    CHECK(cudaFree(0));
    if (!strcmp(what, "props")) {
        int count = 0;
        CHECK(cudaGetDeviceCount(&count));
        for (int device = 0; device < count; device++) {
            CHECK(cudaSetDevice(device));
            cudaDeviceProp prop;
            CHECK(cudaGetDeviceProperties(&prop, device));
            size_t free_bytes, total_bytes;
            CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
            printf("dev %d %s sms %d free %zu MiB total %zu MiB\n", device, prop.name, prop.multiProcessorCount,
                   free_bytes >> 20, total_bytes >> 20);
        }
        return 0;
    }
    if (!strcmp(what, "alloc")) {
        long done = 0;
        for (; done < (long)amount; done += 128) {
            void *block;
            cudaError_t e = cudaMalloc(&block, 128u << 20);
            if (e != cudaSuccess) {
                printf("alloc stopped at %ld MiB: %s\n", done, cudaGetErrorString(e));
                return 0;
            }
        }
        printf("alloc ok %ld MiB\n", done);
        return 0;
    }
    float *out;
    CHECK(cudaMalloc(&out, 1 << 20));
    if (!strcmp(what, "long") || !strcmp(what, "fill")) {
        printf("%s pid %d begins\n", what, getpid());
        fflush(stdout);
        // Every thread of the GPU, or one.
        if (!strcmp(what, "fill")) wait_cycles<<<264, 1024>>>((long long)(amount * 1.9e9));
        else wait_cycles<<<1, 1>>>((long long)(amount * 1.9e9));
        CHECK(cudaDeviceSynchronize());
        printf("%s pid %d ok\n", what, getpid());
        return 0;
    }
    if (!strcmp(what, "sleep") || !strcmp(what, "deaf")) {
        if (!strcmp(what, "deaf")) deafen_the_others();
        printf("%s pid %d begins\n", what, getpid());
        fflush(stdout);
        std::this_thread::sleep_for(std::chrono::duration<double>(amount));
        CHECK(cudaDeviceSynchronize());
        printf("%s pid %d ok\n", what, getpid());
        return 0;
    }
    if (!strcmp(what, "fault")) {
        break_it<<<1, 1>>>();
        CHECK(cudaDeviceSynchronize());
        return 0;
    }
    if (!strcmp(what, "keep")) {
        long wanted = argc > 3 ? atol(argv[3]) : 0, done = 0;
        for (void *block; done < wanted && cudaMalloc(&block, 128u << 20) == cudaSuccess; done += 128) {
        }
        printf("keep pid %d has %ld MiB\n", getpid(), done);
        fflush(stdout);
    }
    bool stubborn = !strcmp(what, "stubborn");
    double end = now() + amount;
    long rounds = 0;
    printf("%s pid %d begins\n", what, getpid());
    fflush(stdout);
    while (now() < end) {
        spin<<<32, 256>>>(out, 20000);
        cudaError_t e = cudaDeviceSynchronize();
        if (e != cudaSuccess) {
            printf("%s pid %d after %ld rounds: %s (%d)\n", what, getpid(), rounds, cudaGetErrorString(e), e);
            fflush(stdout);
            if (stubborn) std::this_thread::sleep_for(std::chrono::duration<double>(end - now()));
            _exit(4);
        }
        rounds++;
    }
    printf("%s pid %d ok rounds %ld\n", what, getpid(), rounds);
    return 0;
}
