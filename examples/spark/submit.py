r"""The commands of idemp as an application of Spark, for a cluster.

    spark-submit --master spark://… --py-files shop.zip submit.py \
        pipeline backfill shop.orders:app s3a://archive --parked s3a://parked --master ''

idemp and its extra `spark` are installed on driver and executors; `shop.zip`, or a wheel, has the app.
"""

from idemp.cli import main

main()
