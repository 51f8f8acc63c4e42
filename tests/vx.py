import sys; sys.path.insert(0,'/work/main')
import time, torch
from tests.pool import WorkerPool
import tests.replicas as R
from runner.verify.snapshot import snapshots
from runner.verify.compare import *
def rec(backend, overrides, steps):
    log=[]; loop=R.make_loop(backend, overrides, log)
    out=[s for s in snapshots(loop, log, steps)]
    loop.policy.close(); 
    return out
if __name__=='__main__':
    import tests.vx as V
    pool=WorkerPool()
    base=["equivalence=exact","recipe.model.dropout=0.1","recipe.model.attention_dropout=0.1","recipe.model.hidden_size=32","recipe.model.layers=2","batch.global_batch=24"]
    for prec in ("fp64","fp32","bf16"):
      for opt in (["optimizer=sgd","optimizer.lr=0.05"],["optimizer=adamw","optimizer.lr=1e-3"]):
        o=[*base,*opt,f"precision={prec}","epochs=4"]
        A=pool.run(1,V.rec,o,20)[0]
        for w,a in ((1,3),(2,1),(3,2)):
            B=pool.run(w,V.rec,[*o,f"accumulation.steps={a}"],20)[0]
            c=Comparison(tolerance_of(PrecisionName[prec]),noise_of(PrecisionName[prec]))
            for x,y in zip(A,B): 
                f=c.add(x,y); print(f) if f else 0
            print(prec,opt[0],w,a,{k:(v.step,v.tensor,f"{v.share:.2g} abs {v.largest:.2g}") for k,v in c.largest.items()}, {k:f"{v:.1g}" for k,v in c.apart.items()})
    pool.close()
