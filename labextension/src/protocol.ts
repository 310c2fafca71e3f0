// Generated from Python by scripts/protocol_types.py: change the classes there and run it, not this file.
// The shapes are those of the JSON after codec.ts: times in seconds since the epoch, sizes in bytes.

export const FINAL_STATES = ['succeeded', 'failed', 'cancelled', 'timed_out', 'lost'] as const;

export const RANK_ENDS = ['done', 'failed', 'interrupted', 'killed', 'stopped', 'lost'] as const;

export const VERSION = 1;

/** The MIME type of an output that is a view: `{job, host}`; `host` has the job directory. */
export const MIME_TYPE = 'application/vnd.torchdist.job+json';

export const LINE_LIMIT = 65536;

/** How many bytes of each file's end a view gets first if it opens in the middle of a job. */
export const FIRST_BYTES = 262144;

/** Seconds between two empty messages of our WebSockets: they show that the connection is not broken. */
export const BEAT = 5;

/** One change. `t` is in seconds since the epoch, on the clock of the process that wrote it. */
export interface Event {
  kind: string;
  t: number;
  node: string | null;
  rank: number | null;
  seq: number;
  /** What belongs to the kind, beside the names above. */
  [data: string]: unknown;
}

/** An exception of a rank as text, which does not need its class. `frames` run from outer to inner. */
export interface ErrorRecord {
  type: string;
  module: string;
  message: string;
  /** The complete traceback with causes and notes, as Python prints it (the user's frames only). */
  text: string;
  /** (file, line number that the user sees, function, source line). */
  frames: [string, number, string, string][];
  t: number;
}

/** One line of a log. `number` counts from 1. */
export interface Evidence {
  file: string;
  number: number;
  text: string;
}

/** A cause. `sentence` is what a person reads first; `rank` and `node` are None where no log tells. */
export interface Finding {
  code: string;
  /** `fault` or `warning`. */
  severity: string;
  rank: number | null;
  node: string | null;
  sentence: string;
  cause: string;
  remedy: string;
  evidence: Evidence[];
}

/** A part of a job's start on hosts: what it waits for, since when, and how long it took; 0 while it goes on. */
export interface Stage {
  text: string;
  began: number;
  seconds: number;
  /** How much of it is done, where that is known. */
  percent: number;
}

/** The collective in which a rank waits: the `number`-th of its `group`. */
export interface Waiting {
  /** For example `all_reduce`. */
  operation: string;
  /** Backend and name, the same on every rank: `gloo:0`. */
  group: string;
  number: number;
  since: number;
  /** Bytes of this rank's input; 0 if unknown. */
  size: number;
  /** The ranks of the group; null: all ranks of the job; empty: unknown. */
  members: number[] | null;
}

/** No rank makes progress. */
export interface Stall {
  /** When a rank made progress at last, in seconds since the epoch. */
  since: number;
  /** When this was noticed. */
  told: number;
  finding: Finding;
  /** Whether the job is ended because of it. */
  ends: boolean;
}

/** One rank. Times in seconds since the epoch, on its node's clock. */
export interface RankState {
  rank: number;
  node: string;
  host: string;
  pid: number;
  /** starting, running, or one of `RANK_ENDS`; `stopped`: because another rank failed or the job was ended. */
  state: string;
  started: number;
  ready: number;
  ended: number;
  error: ErrorRecord | null;
  code: number | null;
  /** How the rank's process ended, if that needs an explanation: `was killed (SIGKILL)`. */
  why: string;
  results: string[];
  /** Names that did not come back, each with the reason. */
  left: [string, string][];
  /** How many printed lines were lost because the disk was full. */
  dropped: number;
  /** Kept if the rank ends in the collective. */
  waiting: Waiting | null;
  /** Where its main thread was at `placed`, when ranks waited for long: `Cell In[3], line 6, train`. */
  place: string;
  placed: number;
  /** How many collectives of each group the rank had entered at `counted`; a missing group means none. */
  entered: Record<string, number>;
  counted: number;
  /** Whether its strategy follows the first steps now, to prove that it may divide them. */
  proving: boolean;
  /** Seconds that this took, once it is over. */
  proved: number;
}

/** A job after one event of its journal; `seq` is the number of this event. */
export interface JobState {
  job: string;
  name: string | null;
  label: string;
  /** submitted, starting, running, stopping, or one of `FINAL_STATES`. */
  state: string;
  world_size: number;
  submitted: number;
  ended: number;
  reason: string;
  first_failure: number | null;
  ranks: Record<string, RankState>;
  notes: string[];
  /** Why it failed: what the failure itself does not say. */
  findings: Finding[];
  /** Kept when the job ends while it stalls. */
  stall: Stall | null;
  driver: Record<string, unknown> | null;
  attempt: number;
  /** How often the ranks were started again after a failure. */
  restarts: number;
  /** While the job waits for the launcher's nodes: `position 3: waiting for GPUs`, as the launcher reports it. */
  queued: string;
  stages: Stage[];
  seq: number;
}

/** The resources of one rank at its agent's last measurement. Sizes in bytes; null means unknown. */
export interface Gauges {
  /** CPU time of the rank and its children, in per cent of one core. */
  cpu: number | null;
  /** Memory of the rank and its children, without mapped files, which ranks share. */
  memory: number | null;
  /** The largest measurement so far. */
  memory_peak: number | null;
  /** Per cent of the time in which its GPU was computing, for any process. */
  gpu: number | null;
  gpu_memory: number | null;
  gpu_memory_peak: number | null;
  gpu_total: number | null;
  /** `gpu_memory` is the memory of all processes on the GPU, because NVML does not report the rank's part. */
  gpu_shared: boolean;
  /** MHz of its multiprocessors. */
  gpu_clock: number | null;
  /** Degrees Celsius. */
  gpu_temperature: number | null;
  /** Why its clock is lower than it could be: `heat, its power limit`. */
  gpu_slowed: string;
  /** Errors of its memory that could not be corrected, since the rank was looked at first. */
  gpu_errors: number | null;
  /** The last error (Xid) that the driver has reported of it. */
  gpu_xid: number | null;
  /** Bytes per second over all its NVLinks. */
  nvlink_received: number | null;
  nvlink_sent: number | null;
  /** How often its NVLinks sent again or started again, since the rank was looked at first. */
  nvlink_errors: number | null;
  /** How often its main thread was looked at during the last minute; the next three are per cent of that. */
  looks: number | null;
  /** It waited in a collective; unknown with NCCL, whose collectives run on the GPU. */
  waits: number | null;
  /** It waited for a `DataLoader`, or was in its code. */
  loads: number | null;
  /** It waited for a socket. */
  network: number | null;
  /** The user's line at which it was most often, when it did not wait: `Cell In[3], line 6`. */
  place: string;
}

/** What goes over a network interface of a host, for any process. Bytes per second. */
export interface Traffic {
  received: number;
  sent: number;
}

/** One field for each option, with its default. */
export interface Options {
  gpus: number | null;
  gpu_type: string | null;
  remote: boolean;
  ranks: number | null;
  nodes: number | null;
  /** MIN of `--nodes MIN:MAX`: with how many hosts the job goes on when others are lost. None: all are needed. */
  least_nodes: number | null;
  launcher: string;
  hosts: string[];
  /** Settings of hosts (`protocol/hosts.py`), first from a file, then from the option line. */
  host_option: string[];
  backend: string | null;
  numa_binding: string | null;
  strategy: string | null;
  /** `key=value` texts, first from a file, then from the option line; the last text of a key counts. */
  option: string[];
  config: string | null;
  precision: string;
  compile: boolean;
  activation_checkpointing: boolean;
  grad_accumulation: number;
  verify: number;
  checkpoint: string | null;
  resume: boolean;
  /** Remarks on settings of a configuration file. */
  remarks: string[];
  /** Files of options that are not used, each with the reason. */
  ignored: string[];
  out: string[];
  collect: string;
  include: string[];
  exclude: string[];
  sync: string[];
  env_sync: boolean;
  background: boolean;
  name: string | null;
  restarts: number;
  timeout: number | null;
  grace: number;
  /** Seconds without progress after which a job may be called stalled; 0: never. */
  stall: number;
  stall_kill: boolean;
  lease: number;
  env: string[];
  fresh: boolean;
  replace: boolean;
  wait: boolean;
  plan: boolean;
  profile: number;
  track: string[];
  watch: string;
  /** ROLE_NAME of the ranks. This and the next three are torchrun's options in the shell (`verbs/torchrun.py`). */
  role: string;
  /** TORCHELASTIC_RUN_ID; empty: the job's id. */
  run_id: string;
  /** MASTER_PORT; 0: a free port. */
  port: number;
  /** Whether each rank sees its own GPU only, with LOCAL_RANK 0. */
  virtual_local_rank: boolean;
}

/** The specification of one job. `source` is the cell without the magic's line. */
export interface JobSpec {
  job: string;
  /** `cell` (the source runs in `__main__`), `function`, `script` (text), `module` (name) or `command`. */
  kind: string;
  source: string;
  /** The file name in tracebacks, such as `Cell In[12]` or a script's path. */
  label: string;
  /** Line of `source`'s first line as the user sees it: 2 under a magic. */
  first_line: number;
  options: Options;
  /** Seconds since the epoch. */
  created: number;
  /** `sys.argv` of a program: the script as it was typed, `-m`, or a command; then its arguments. */
  argv: string[];
  /** The path of the notebook or of the kernel's session, for the panel and `%dist`. */
  notebook: string;
  /** The job that this job runs again; empty if this is no rerun. */
  rerun_of: string;
  /** With `--track`: commit, branch and changes of the directory's repository; empty without one. */
  git: Record<string, string>;
}

/** How an interpreter is started on a host that `ssh` reaches. All is empty for this machine. */
export interface Reach {
  python: string;
  /** A directory of the host for code and data. */
  scratch: string;
  /** Commands of the shell before Python. */
  setup: string;
  /** How much of the files that a cell writes there comes back at most, such as `1G`. */
  bring: string;
  /** A socket of this machine that `ssh` forwards to the agent's. */
  forward: string;
  /** Of the connection that found the agent, as the agent calls it. */
  login: string;
}

/** The packages of the notebook that a host lacks, or has in another version. */
export interface Wanted {
  /** `numpy==2.3.1`. */
  pins: string[];
  /** Versions of the distributions that the host has, by their normalised names. */
  present: Record<string, string>;
  /** Of the host's Python. */
  release: string;
  /** As in `Inventory`. */
  platform: string;
}

/** One node's part of the plan: its global ranks in order of local rank, and the GPU of each (empty on CPUs). */
export interface NodePlan {
  name: string;
  ranks: number[];
  gpus: string[];
  /** Their numbers on the host, as `nvidia-smi` counts; empty if they were chosen after the plan. */
  gpu_numbers: number[];
  /** The address for other nodes: loopback on a single node, else an IP. Empty: by the route to the first node. */
  address: string;
  /** Empty: that of the address, which the node finds itself. */
  interface: string;
  /** `OMP_NUM_THREADS` of each rank, unless the user set it. */
  threads: number;
  reach: Reach;
  /** The host name; empty if it is not known yet. */
  host: string;
  /** With `--env-sync`: what is to be installed there. */
  packages: Wanted | null;
}

/** The strategy of one job. The product of all degrees is the world size. */
export interface StrategyPlan {
  /** The chosen strategy, for example `fsdp+tp`; for `auto` the strategy that it chose. */
  name: string;
  /** Ranks along each of `DIMENSIONS`; a missing dimension has 1. */
  degrees: Record<string, number>;
  /** Converted values from `-O` and the configuration file, without defaults. */
  options: Record<string, unknown>;
  precision: string;
  compile: boolean;
  activation_checkpointing: boolean;
  grad_accumulation: number;
  /** How many optimizer steps are compared with one device. */
  verify: number;
  /** Directory of the automatic checkpoints. */
  checkpoint: string | null;
  resume: boolean;
  /** Checkpoints that were complete before this time, in seconds since the epoch, are not resumed. */
  since: number;
  /** The decisions and their reasons, for `--plan` and the receipt. */
  notes: string[];
}

/** How an attempt ended after which the ranks were started again. */
export interface Died {
  /** Its number, from 1. */
  attempt: number;
  /** What ended it; equal for faults of one kind. */
  fault: string;
  /** The last one that its ranks told of; None: unknown. */
  step: number | null;
}

/** The plan of one job. The first node hosts the rendezvous store. */
export interface Plan {
  job: string;
  world_size: number;
  backend: string;
  nodes: NodePlan[];
  fresh: boolean;
  numa_binding: string | null;
  timeout: number | null;
  grace: number;
  collect: string;
  out: string[];
  env_names: string[];
  strategy: StrategyPlan;
  role: string;
  /** The run id for the ranks; empty: made from the job's id and attempt. */
  run_id: string;
  /** The port of the rendezvous store; 0: a free port. */
  port: number;
  /** How often all ranks are started again after a failure. */
  restarts: number;
  /** With how many nodes the job goes on when others are lost. None: all are needed. */
  least_nodes: number | null;
  /** How the attempt before ended; None for the first. */
  died: Died | null;
  virtual_local_rank: boolean;
  /** Seconds that ranks on hosts go on without the driver. */
  lease: number;
  /** Seconds that the question to the hosts took. */
  asked: number;
  /** The number of the machine that drives the job. Each machine that takes the job over has the next number. */
  driver: number;
  /** Directories of this machine that go to the hosts, as absolute paths. */
  sync: string[];
  /** With `sync`: the notebook's directory. */
  cwd: string;
  /** What the engine is sent, such as a batch script; empty where the driver starts everything itself. */
  request: string;
  /** Of the engine, in which the job runs: the id of a Slurm job, the address of a Ray cluster; empty: a new one. */
  allocation: string;
  /** The host on which the engine's commands run, over SSH; empty: this machine. */
  login: string;
  /** Files that say where the engine is (`KUBECONFIG`), as absolute paths; empty: where it looks by itself. */
  configuration: string;
}

/** One line of the receipt: a name, its kind and description, its size (bytes), and the line that needs it. */
export interface Captured {
  name: string;
  /** `module`, `function`, `class`, `tensor`, `array`, `model`, `data`… */
  kind: string;
  /** For example `torch as import` or `Tensor float32 (60000, 784)`. */
  what: string;
  size: number;
  /** For example `line 4` or `function evaluate (Cell In[3], line 2)`. */
  needed: string;
}

/** A piece of one file: whole lines, or a part of a very long one. */
export interface Segment {
  file: string;
  start: number;
  end: number;
  t: number | null;
  text: string;
}

/** A line that a search found, from its `start`. */
export interface Hit {
  file: string;
  start: number;
  t: number | null;
  text: string;
}

/** A curve of one rank, or of several (`rank` is null) as a band. */
export interface Series {
  name: string;
  rank: number | null;
  x: number[];
  y: number[];
  low: number[];
  high: number[];
}

/** A progress bar; `total` is null if it is unknown. */
export interface Progress {
  desc: string;
  n: number;
  total: number | null;
}

/** Ranks that wait in the same collective. */
export interface Wait {
  ranks: number[];
  /** For example `all_reduce #17`. */
  collective: string;
  /** The ranks for which it waits, as far as they are known. */
  awaited: number[];
  since: number;
}

/** The step of a rank, and the last value of each of its curves. */
export interface RankStatus {
  step: number | null;
  last: Record<string, number>;
}

/** The names of the curves. */
export interface CurveNames {
  version: number;
  names: string[];
  note: string;
}

/** The first message. `spec`, `plan`, `receipt` and `state` are the JSON of the records. */
export interface Hello {
  version: number;
  now: number;
  job: string;
  spec: unknown;
  plan: unknown;
  receipt: unknown[];
  notes: string[];
  command: string;
  state: unknown;
  sizes: Record<string, number>;
}

/** `Event` as in the journal. */
export interface Events {
  events: unknown[];
}

/** Segments in order of time. */
export interface Lines {
  segments: Segment[];
}

/** Where the job is recorded: `link` is a page, a directory, or empty; `said` is what does not go well. */
export interface Tracked {
  tracker: string;
  link: string;
  said: string;
}

/** Data that changes often. A server that is older than the page does not send the fields of `_Newer`. */
export interface Status {
  gauges?: Record<string, Gauges>;
  network?: Record<string, Record<string, Traffic>>;
  samples?: number | null;
  tracked?: Tracked[];
  findings?: Finding[];
  effective: string;
  progress: Progress | null;
  ranks: Record<string, RankStatus>;
  curves: CurveNames;
}

/** The last message. */
export interface Gone {
  reason: string;
}

/** The answer to `older`. */
export interface Older {
  segments: Segment[];
  at: Record<string, number>;
}

/** The answer to `around`. */
export interface Around {
  segments: Segment[];
}

/** The answer to `search`. */
export interface Found {
  hits: Hit[];
  at: Record<string, number> | null;
  searched: number;
}

/** The answer to `curves`. */
export interface Drawn {
  version: number;
  complete: boolean;
  series: Series[];
}

/** The answer to `display`: a MIME bundle, as in a notebook. */
export interface Shown {
  data: Record<string, unknown>;
  metadata: Record<string, unknown>;
}

/** What NCCL's log says of a node: how its ranks reach each other, and the other nodes: `P2P/IPC`. */
export interface Transports {
  node: string;
  inside: string[];
  outside: string[];
}

/** A collective, and when each of `ranks` entered it. `missing`: ranks that have not. */
export interface Entered {
  /** For example `all_reduce #17 of 4 float32`. */
  name: string;
  /** Empty for the group of all ranks. */
  group: string;
  ranks: number[];
  at: number[];
  missing: number[];
  /** On all of `ranks`. */
  ended: boolean;
}

/** The answer to `communication`. `calls` are in the order of their first rank. */
export interface Communication {
  transports: Transports[];
  calls: Entered[];
  time: number | null;
  silent: number[];
}

/** The answer to `cancel`. */
export interface Said {
  said: string;
}

/** One job. Times in seconds since the epoch; 0 means that it has not happened. */
export interface Row {
  job: string;
  name: string | null;
  label: string;
  /** The path of the notebook or of the kernel's session; empty for a job from a shell. */
  notebook: string;
  state: string;
  /** `state`, or `orphaned` or `unreachable`. */
  effective: string;
  world_size: number;
  submitted: number;
  ended: number;
  reason: string;
  progress: Progress | null;
  /** How many samples the job has trained with; None if unknown, and after the job's end. */
  samples: number | null;
  /** The latest values of the job's first curve. */
  spark: number[];
  /** Curves whose last value is not a finite number. Not searched in a job that had ended when the server started. */
  broken: string[];
  /** Ranks that wait in a collective, if any do; the longest wait. */
  wait: Wait | null;
  /** Who holds up the others, if no rank makes progress now. */
  stall: Stall | null;
  /** The UUIDs of the plan's GPUs. */
  gpus: string[];
  /** Bytes in use and total bytes of these GPUs; None if unknown, and after the job's end. */
  gpu_memory: [number, number] | null;
  /** The job that was run again as this job; empty if this is no rerun. */
  rerun_of: string;
  /** The job cannot be opened (`reason` says why), only deleted. */
  damaged: boolean;
}
