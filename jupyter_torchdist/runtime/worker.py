import os,sys,time
def main(job_root, blobs, node):
    from pathlib import Path
    from jupyter_torchdist.protocol.paths import JobPaths
    from jupyter_torchdist.protocol.process import ProcessId
    from jupyter_torchdist.runtime.eventfile import EventFile
    import torch, torch.distributed as dist
    rank=int(os.environ["RANK"]); paths=JobPaths(Path(job_root)); n=paths.node(node)
    ev=EventFile(n.rank_events(rank),rank)
    ev.write("rank.started",process=ProcessId.mine().to_json(),local_rank=int(os.environ["LOCAL_RANK"]))
    fd=os.open(n.out(rank),os.O_WRONLY|os.O_APPEND|os.O_CREAT,0o600); os.dup2(fd,1)
    dist.init_process_group("gloo")
    ev.write("rank.ready")
    t=torch.ones(1); dist.all_reduce(t); 
    os.write(1,f"hello {rank} {t} {torch.ones(100,100)@torch.ones(100,100)}".encode()[:40])
    src=(Path(job_root)/"spec.json").read_text()
    if "BOOM" in src and rank==1: os._exit(3)
    if "SLEEP" in src: time.sleep(30)
    dist.destroy_process_group()
    ev.write("rank.done")
